"""Denoising heads: continuous tokens of a diffusion (MAR, 2406.11838) or a flow (NextStep-1, 2508.10711)."""

from mmspec.models.denoising.annealing import StepAnnealing
from mmspec.models.denoising.head import DenoisingHead, DenoisingHeadConfig, DenoisingProcess
from mmspec.models.denoising.net import DenoisingNet, Modulations
from mmspec.models.denoising.schedule import DDPMSchedule, DenoisingSchedule, FlowSchedule

__all__ = [
    "DDPMSchedule",
    "DenoisingHead",
    "DenoisingHeadConfig",
    "DenoisingNet",
    "DenoisingProcess",
    "DenoisingSchedule",
    "FlowSchedule",
    "Modulations",
    "StepAnnealing",
]
