"""The descriptor pool of this package's messages, and how a generated module gets its contents.

Generated modules hold their file's descriptor, serialized, and nothing that depends on a protobuf release: the pool
and protobuf's builder make the classes, as they do for protoc's own output.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.internal import builder

POOL = DescriptorPool()


def build(file: bytes, module_name: str, module: dict[str, Any]) -> FileDescriptor:
    """Add ``file`` (a serialized FileDescriptorProto) to the pool and its messages, enums and services to ``module``."""
    descriptor: FileDescriptor = POOL.AddSerializedFile(file)
    builder.BuildMessageAndEnumDescriptors(descriptor, module)
    builder.BuildTopDescriptorsAndMessages(descriptor, module_name, module)
    return descriptor
