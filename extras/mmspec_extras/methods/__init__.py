"""Methods, one per folder; the entry point `mmspec.methods` names their records."""

from importlib import import_module
from pkgutil import iter_modules

METHODS = tuple(import_module(f"{__name__}.{folder.name}").METHOD for folder in iter_modules(__path__))
