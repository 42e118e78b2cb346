"""The algorithms: one file each, with its config, its Algorithm and its loss hook.

Importing this package loads none of them; :mod:`rllib_mhgpo.algorithms.registration` finds them by name.
"""
