# Generated from google/protobuf/struct.proto by tools/generate_protos.py. Do not edit.
"""Messages of the package ``google.protobuf``."""

from trio_frontend.protos._pool import build as _build

DESCRIPTOR = _build(
    b'\n\x1cgoogle/protobuf/struct.proto\x12\x0fgoogle.protobuf"\x84\x01\n\x06Struct\x123\n\x06fields\x18\x01 \x03(\x0b2#.goo'
    b'gle.protobuf.Struct.FieldsEntry\x1aE\n\x0bFieldsEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12%\n\x05value\x18\x02 \x01(\x0b2\x16.goo'
    b'gle.protobuf.Value:\x028\x01"\xea\x01\n\x05Value\x120\n\nnull_value\x18\x01 \x01(\x0e2\x1a.google.protobuf.NullValue'
    b'H\x00\x12\x16\n\x0cnumber_value\x18\x02 \x01(\x01H\x00\x12\x16\n\x0cstring_value\x18\x03 \x01(\tH\x00\x12\x14\n\nbool_value\x18\x04 \x01(\x08H\x00\x12/\n\x0cstru'
    b'ct_value\x18\x05 \x01(\x0b2\x17.google.protobuf.StructH\x00\x120\n\nlist_value\x18\x06 \x01(\x0b2\x1a.google.protobuf.'
    b'ListValueH\x00B\x06\n\x04kind"3\n\tListValue\x12&\n\x06values\x18\x01 \x03(\x0b2\x16.google.protobuf.Value*\x1b\n\tNull'
    b'Value\x12\x0e\n\nNULL_VALUE\x10\x00b\x06proto3',
    __name__,
    globals(),
)
