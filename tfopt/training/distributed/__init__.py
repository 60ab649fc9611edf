"""Several devices and several processes: strategies, clusters, the start of workers.

Start in strategy.py; cluster.py reads Slurm and TF_CONFIG, and launch.py starts workers on one machine.
"""
