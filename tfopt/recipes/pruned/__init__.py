"""Recipes for each kind of pruning, on the network of `resnet_cifar`

Start in resnet_shrunk.py.
"""
