# Generated from grpc/health/v1/health.proto by tools/generate_protos.py. Do not edit.
"""Messages of the package ``grpc.health.v1``."""

from trio_frontend.protos._pool import build as _build

DESCRIPTOR = _build(
    b'\n\x1bgrpc/health/v1/health.proto\x12\x0egrpc.health.v1"%\n\x12HealthCheckRequest\x12\x0f\n\x07service\x18\x01'
    b' \x01(\t"\xa9\x01\n\x13HealthCheckResponse\x12A\n\x06status\x18\x01 \x01(\x0e21.grpc.health.v1.HealthCheckRespons'
    b'e.ServingStatus"O\n\rServingStatus\x12\x0b\n\x07UNKNOWN\x10\x00\x12\x0b\n\x07SERVING\x10\x01\x12\x0f\n\x0bNOT_SERVING\x10\x02\x12\x13\n\x0fS'
    b'ERVICE_UNKNOWN\x10\x03"\x13\n\x11HealthListRequest"\xae\x01\n\x12HealthListResponse\x12B\n\x08statuses\x18\x01 \x03(\x0b20'
    b'.grpc.health.v1.HealthListResponse.StatusesEntry\x1aT\n\rStatusesEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x122'
    b'\n\x05value\x18\x02 \x01(\x0b2#.grpc.health.v1.HealthCheckResponse:\x028\x012\xfd\x01\n\x06Health\x12P\n\x05Check\x12".grp'
    b'c.health.v1.HealthCheckRequest\x1a#.grpc.health.v1.HealthCheckResponse\x12M\n\x04List\x12!.gr'
    b'pc.health.v1.HealthListRequest\x1a".grpc.health.v1.HealthListResponse\x12R\n\x05Watch\x12".gr'
    b'pc.health.v1.HealthCheckRequest\x1a#.grpc.health.v1.HealthCheckResponse0\x01b\x06proto3',
    __name__,
    globals(),
)
