"""The configuration that the coordinator gives to its ranks."""

from cp_wire.effective import settle
from cp_wire.pb import common_pb2
from model_files import ModelFiles

MAX_WAITING = 1024
"""Requests that may queue in one scheduling set."""


def effective_config(asked: common_pb2.ClusterConfig, model: ModelFiles) -> common_pb2.ClusterConfig:
    """Settles what was asked for and states which model it is for; raises LayoutError or ConfigRefused."""
    config = settle(asked, model.shape)
    config.model_hash, config.model_name = model.hash, model.name
    return config
