"""What `args` of a deployments/*.yaml may say, and nothing else.

Only names are checked here; the plan decides whether a topology exists and a model fits. Every spec is frozen and
refuses unknown keys, naming the nearest known one.
"""

from serving.config.file import IMPORT_PATH, DeploymentFile, load
from serving.config.gke import ON_DISK, OWN_REDIS, GatewaySpec, GkeSpec
from serving.config.models import (
    AUTO,
    MOST_SLICES,
    CapacityType,
    ModelSpec,
    ParallelSpec,
    PoolSpec,
    QueueSpec,
    ReplicaSpec,
    RolloutSpec,
    SliceSpec,
    SloSpec,
)
from serving.config.router import (
    SENTINEL_LOGPROBS,
    Affinity,
    Doors,
    FailoverSpec,
    KeyLimits,
    KeysSpec,
    OidcRule,
    OidcSpec,
    PreemptionSpec,
    ResponsesStoreSpec,
    RouterSpec,
    Seeds,
    SentinelSpec,
    is_encrypted,
)
from serving.config.service import BudgetSpec, ServiceConfig, parse
from serving.config.store import BatchSpec, StoreSpec

__all__ = [
    "AUTO",
    "IMPORT_PATH",
    "MOST_SLICES",
    "ON_DISK",
    "OWN_REDIS",
    "SENTINEL_LOGPROBS",
    "Affinity",
    "BatchSpec",
    "BudgetSpec",
    "CapacityType",
    "DeploymentFile",
    "Doors",
    "FailoverSpec",
    "GatewaySpec",
    "GkeSpec",
    "KeyLimits",
    "KeysSpec",
    "ModelSpec",
    "OidcRule",
    "OidcSpec",
    "ParallelSpec",
    "PoolSpec",
    "PreemptionSpec",
    "QueueSpec",
    "ReplicaSpec",
    "ResponsesStoreSpec",
    "RolloutSpec",
    "RouterSpec",
    "Seeds",
    "SentinelSpec",
    "ServiceConfig",
    "SliceSpec",
    "SloSpec",
    "StoreSpec",
    "is_encrypted",
    "load",
    "parse",
]
