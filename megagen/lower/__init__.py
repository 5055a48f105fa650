"""Graph + schedule + machine -> Plan. The only place where placement decisions turn into numbers.

It rejects what it cannot express (a directive about nothing); whether the Plan is safe is :mod:`megagen.check`'s
business.
"""

from megagen.lower.lower import distinct, lower

__all__ = ["distinct", "lower"]
