from .cluster import cluster
from .config import ClusteringConfig

__all__ = ["ClusteringConfig", "cluster"]
