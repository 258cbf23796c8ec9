"""CrossNovo (2510.08169): reads peptides in mass spectra with a parallel and an autoregressive decoder."""

from mmspec_extras.crossnovo.modeling import CrossNovo, CrossNovoConfig, Spectra

__all__ = ["CrossNovo", "CrossNovoConfig", "Spectra"]
