"""Microbenchmarks of the user's GPU: what a schedule is decided by, as figures of a machine description.

A :class:`~megagen.probe.case.Case` measures one effect with kernels of ``templates/probe/``; ``run`` runs cases one by
one, ``describe`` writes what they found.
"""
