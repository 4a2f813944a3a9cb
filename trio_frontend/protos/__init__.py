"""The API's messages, and purerpc's servicers and stubs for it, generated from the ``.proto`` files in ``proto/``.

``from trio_frontend.protos.vllm import inference_pb2, inference_grpc``. Change the ``.proto`` files and run ``just proto``;
only this module, ``_pool`` and ``_typing`` are written by hand.

All messages live in :data:`POOL`, a descriptor pool of their own. Other packages define the same names (grpcio-health-checking,
grpcio-reflection, stubs generated from vLLM's protos), and protobuf's default pool takes a name once per process.
Messages of the two pools are different classes: they meet as bytes only.
"""

from trio_frontend.protos._pool import POOL

__all__ = ["POOL"]
