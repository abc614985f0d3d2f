"""The environment that travels: this Python environment as archives, and what a node that has nothing is given.

`pack_environment` makes the archives, once for each state of the environment; `carry` lays out the folder that goes to
nodes, `starter_command` is what a job runs there. What happens on the node is `stoker.pilot.starter`.
"""
