"""Model repositories: an artifact as a numbered version, with the files that TensorFlow Serving and Triton read.

Start in publish.py, which has `tfopt.publish`. tensorflow_serving.py and triton.py write what one server reads.
"""
