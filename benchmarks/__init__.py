"""Measurements that are run from a clone; nothing here is installed."""
