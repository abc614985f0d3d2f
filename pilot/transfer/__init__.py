"""Objects from pilot to pilot: who serves, who fetches, and what they say to each other.

But for the seed, standard library alone, and of this package its modules that need no more (`stoker.errors`): a node
that has nothing but Python gets its environment with it.
"""
