"""First come, first served with a priced express lane: nobody is served earlier for nothing, so passing has a price.

Guarantee: sojourn <= that of first come, first served / (1 - price), and some iterations, as far as iterations take the
same and evictions for growth do not differ, whatever was learned of the lengths.
"""
