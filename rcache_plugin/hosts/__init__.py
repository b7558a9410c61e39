"""Hosts: what builds graphs and asks the cache where states lie. Nothing else in the package imports them."""
