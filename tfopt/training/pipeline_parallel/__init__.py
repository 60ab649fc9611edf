"""Pipeline parallelism: the stages of a model lie on different devices.

Start in step.py; stages.py cuts a model into stages.
"""
