"""Methods, one per folder; the entry point `mmspec.methods` names their records."""

from importlib import import_module
from pkgutil import iter_modules

FOLDERS = [import_module(f"{__name__}.{each.name}") for each in iter_modules(__path__)]
METHODS = tuple(method for folder in FOLDERS for method in folder.METHODS)
