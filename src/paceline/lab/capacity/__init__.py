"""Capacity on paper: how many replicas a load takes, with speculation and without, before any is bought."""
