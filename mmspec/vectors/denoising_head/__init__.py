"""Denoising heads for continuous tokens: diffusion (MAR, 2406.11838) or flow (NextStep-1, 2508.10711)."""

from mmspec.vectors.denoising_head.annealing import StepAnnealing
from mmspec.vectors.denoising_head.head import DenoisingHead, DenoisingHeadConfig, DenoisingProcess
from mmspec.vectors.denoising_head.net import DenoisingNet, Modulations
from mmspec.vectors.denoising_head.schedule import DDPMSchedule, DenoisingSchedule, FlowSchedule

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
