"""XLNet, an any-subset density model."""

from mmspec.plugins import Family

FAMILIES = (Family("xlnet", "mmspec_extras.families.xlnet.target:AnySubsetTarget"),)
