from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODE_UNSPECIFIED: _ClassVar[Mode]
    MODE_PACKED: _ClassVar[Mode]
    MODE_DIRECT: _ClassVar[Mode]
MODE_UNSPECIFIED: Mode
MODE_PACKED: Mode
MODE_DIRECT: Mode

class DescribeRequest(_message.Message):
    __slots__ = ("protocol_version", "epoch", "worker", "rank", "layout", "known_layout_digest", "data_key", "protocol_newest")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    KNOWN_LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DATA_KEY_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_NEWEST_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    epoch: bytes
    worker: str
    rank: int
    layout: bytes
    known_layout_digest: str
    data_key: bytes
    protocol_newest: int
    def __init__(self, protocol_version: _Optional[int] = ..., epoch: _Optional[bytes] = ..., worker: _Optional[str] = ..., rank: _Optional[int] = ..., layout: _Optional[bytes] = ..., known_layout_digest: _Optional[str] = ..., data_key: _Optional[bytes] = ..., protocol_newest: _Optional[int] = ...) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("protocol_version", "epoch", "worker", "rank", "layout_digest", "layout", "transports", "host", "protocol_newest")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_NEWEST_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    epoch: bytes
    worker: str
    rank: int
    layout_digest: str
    layout: bytes
    transports: _containers.RepeatedScalarFieldContainer[str]
    host: str
    protocol_newest: int
    def __init__(self, protocol_version: _Optional[int] = ..., epoch: _Optional[bytes] = ..., worker: _Optional[str] = ..., rank: _Optional[int] = ..., layout_digest: _Optional[str] = ..., layout: _Optional[bytes] = ..., transports: _Optional[_Iterable[str]] = ..., host: _Optional[str] = ..., protocol_newest: _Optional[int] = ...) -> None: ...

class OpenRequest(_message.Message):
    __slots__ = ("transfer", "ticket", "epoch", "source_epoch", "target_worker", "target_rank", "layout_digest", "plan_digest", "first_token", "relay", "transport", "mode", "chunk_bytes")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SOURCE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TARGET_WORKER_FIELD_NUMBER: _ClassVar[int]
    TARGET_RANK_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PLAN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    RELAY_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    transfer: str
    ticket: bytes
    epoch: bytes
    source_epoch: bytes
    target_worker: str
    target_rank: int
    layout_digest: str
    plan_digest: str
    first_token: int
    relay: bool
    transport: str
    mode: Mode
    chunk_bytes: int
    def __init__(self, transfer: _Optional[str] = ..., ticket: _Optional[bytes] = ..., epoch: _Optional[bytes] = ..., source_epoch: _Optional[bytes] = ..., target_worker: _Optional[str] = ..., target_rank: _Optional[int] = ..., layout_digest: _Optional[str] = ..., plan_digest: _Optional[str] = ..., first_token: _Optional[int] = ..., relay: bool = ..., transport: _Optional[str] = ..., mode: _Optional[_Union[Mode, str]] = ..., chunk_bytes: _Optional[int] = ...) -> None: ...

class OpenResponse(_message.Message):
    __slots__ = ("epoch", "generation", "session", "lease_s", "chunks", "payload_bytes", "mode")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    epoch: bytes
    generation: int
    session: bytes
    lease_s: float
    chunks: int
    payload_bytes: int
    mode: Mode
    def __init__(self, epoch: _Optional[bytes] = ..., generation: _Optional[int] = ..., session: _Optional[bytes] = ..., lease_s: _Optional[float] = ..., chunks: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., mode: _Optional[_Union[Mode, str]] = ...) -> None: ...

class CompleteRequest(_message.Message):
    __slots__ = ("transfer", "epoch", "source_epoch", "session", "target_worker", "target_rank", "generation", "payload_bytes")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SOURCE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TARGET_WORKER_FIELD_NUMBER: _ClassVar[int]
    TARGET_RANK_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    transfer: str
    epoch: bytes
    source_epoch: bytes
    session: bytes
    target_worker: str
    target_rank: int
    generation: int
    payload_bytes: int
    def __init__(self, transfer: _Optional[str] = ..., epoch: _Optional[bytes] = ..., source_epoch: _Optional[bytes] = ..., session: _Optional[bytes] = ..., target_worker: _Optional[str] = ..., target_rank: _Optional[int] = ..., generation: _Optional[int] = ..., payload_bytes: _Optional[int] = ...) -> None: ...

class CompleteResponse(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: str
    def __init__(self, state: _Optional[str] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("transfer", "epoch", "session", "target_worker", "target_rank", "reason", "ticket", "relay")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TARGET_WORKER_FIELD_NUMBER: _ClassVar[int]
    TARGET_RANK_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    RELAY_FIELD_NUMBER: _ClassVar[int]
    transfer: str
    epoch: bytes
    session: bytes
    target_worker: str
    target_rank: int
    reason: str
    ticket: bytes
    relay: bool
    def __init__(self, transfer: _Optional[str] = ..., epoch: _Optional[bytes] = ..., session: _Optional[bytes] = ..., target_worker: _Optional[str] = ..., target_rank: _Optional[int] = ..., reason: _Optional[str] = ..., ticket: _Optional[bytes] = ..., relay: bool = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: str
    def __init__(self, state: _Optional[str] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("transfer", "epoch", "session", "target_worker", "target_rank", "ticket")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TARGET_WORKER_FIELD_NUMBER: _ClassVar[int]
    TARGET_RANK_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    transfer: str
    epoch: bytes
    session: bytes
    target_worker: str
    target_rank: int
    ticket: bytes
    def __init__(self, transfer: _Optional[str] = ..., epoch: _Optional[bytes] = ..., session: _Optional[bytes] = ..., target_worker: _Optional[str] = ..., target_rank: _Optional[int] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ("lease_s",)
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    lease_s: float
    def __init__(self, lease_s: _Optional[float] = ...) -> None: ...
