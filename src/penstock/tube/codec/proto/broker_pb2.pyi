from penstock.tube.codec.proto import shared_pb2 as _shared_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SendBatch(_message.Message):
    __slots__ = ("datas", "flags", "msgTypes")
    DATAS_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    MSGTYPES_FIELD_NUMBER: _ClassVar[int]
    datas: _containers.RepeatedScalarFieldContainer[bytes]
    flags: _containers.RepeatedScalarFieldContainer[int]
    msgTypes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, datas: _Optional[_Iterable[bytes]] = ..., flags: _Optional[_Iterable[int]] = ..., msgTypes: _Optional[_Iterable[str]] = ...) -> None: ...

class ProducerSequence(_message.Message):
    __slots__ = ("producerId", "sequence", "oldest")
    PRODUCERID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    OLDEST_FIELD_NUMBER: _ClassVar[int]
    producerId: int
    sequence: int
    oldest: int
    def __init__(self, producerId: _Optional[int] = ..., sequence: _Optional[int] = ..., oldest: _Optional[int] = ...) -> None: ...

class Transaction(_message.Message):
    __slots__ = ("step", "query", "run", "epoch", "batch", "attempt", "rows", "winners", "transactionId", "participants", "once")
    class Step(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        NONE: _ClassVar[Transaction.Step]
        BEGIN: _ClassVar[Transaction.Step]
        STAGE: _ClassVar[Transaction.Step]
        PREPARE: _ClassVar[Transaction.Step]
        COMMIT: _ClassVar[Transaction.Step]
        ABORT: _ClassVar[Transaction.Step]
    NONE: Transaction.Step
    BEGIN: Transaction.Step
    STAGE: Transaction.Step
    PREPARE: Transaction.Step
    COMMIT: Transaction.Step
    ABORT: Transaction.Step
    STEP_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    WINNERS_FIELD_NUMBER: _ClassVar[int]
    TRANSACTIONID_FIELD_NUMBER: _ClassVar[int]
    PARTICIPANTS_FIELD_NUMBER: _ClassVar[int]
    ONCE_FIELD_NUMBER: _ClassVar[int]
    step: int
    query: str
    run: str
    epoch: int
    batch: int
    attempt: StagedAttempt
    rows: _containers.RepeatedCompositeFieldContainer[StagedRows]
    winners: _containers.RepeatedCompositeFieldContainer[StagedAttempt]
    transactionId: str
    participants: _containers.RepeatedScalarFieldContainer[str]
    once: bool
    def __init__(self, step: _Optional[int] = ..., query: _Optional[str] = ..., run: _Optional[str] = ..., epoch: _Optional[int] = ..., batch: _Optional[int] = ..., attempt: _Optional[_Union[StagedAttempt, _Mapping[str, object]]] = ..., rows: _Optional[_Iterable[_Union[StagedRows, _Mapping[str, object]]]] = ..., winners: _Optional[_Iterable[_Union[StagedAttempt, _Mapping[str, object]]]] = ..., transactionId: _Optional[str] = ..., participants: _Optional[_Iterable[str]] = ..., once: bool = ...) -> None: ...

class StagedAttempt(_message.Message):
    __slots__ = ("task", "attempt", "rows")
    TASK_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    task: int
    attempt: str
    rows: int
    def __init__(self, task: _Optional[int] = ..., attempt: _Optional[str] = ..., rows: _Optional[int] = ...) -> None: ...

class StagedRows(_message.Message):
    __slots__ = ("topicName", "partitionId", "batch")
    TOPICNAME_FIELD_NUMBER: _ClassVar[int]
    PARTITIONID_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    topicName: str
    partitionId: int
    batch: SendBatch
    def __init__(self, topicName: _Optional[str] = ..., partitionId: _Optional[int] = ..., batch: _Optional[_Union[SendBatch, _Mapping[str, object]]] = ...) -> None: ...

class TransactionResult(_message.Message):
    __slots__ = ("refusal", "committed", "stagedRows", "transactionId", "transactionBatch", "publishing", "participants", "run")
    class Refusal(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        NOT_REFUSED: _ClassVar[TransactionResult.Refusal]
        FENCED: _ClassVar[TransactionResult.Refusal]
        NOT_STAGED: _ClassVar[TransactionResult.Refusal]
        FULL: _ClassVar[TransactionResult.Refusal]
        UNDECIDED: _ClassVar[TransactionResult.Refusal]
        OTHER: _ClassVar[TransactionResult.Refusal]
    NOT_REFUSED: TransactionResult.Refusal
    FENCED: TransactionResult.Refusal
    NOT_STAGED: TransactionResult.Refusal
    FULL: TransactionResult.Refusal
    UNDECIDED: TransactionResult.Refusal
    OTHER: TransactionResult.Refusal
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    STAGEDROWS_FIELD_NUMBER: _ClassVar[int]
    TRANSACTIONID_FIELD_NUMBER: _ClassVar[int]
    TRANSACTIONBATCH_FIELD_NUMBER: _ClassVar[int]
    PUBLISHING_FIELD_NUMBER: _ClassVar[int]
    PARTICIPANTS_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    refusal: int
    committed: int
    stagedRows: int
    transactionId: str
    transactionBatch: int
    publishing: bool
    participants: _containers.RepeatedScalarFieldContainer[str]
    run: str
    def __init__(self, refusal: _Optional[int] = ..., committed: _Optional[int] = ..., stagedRows: _Optional[int] = ..., transactionId: _Optional[str] = ..., transactionBatch: _Optional[int] = ..., publishing: bool = ..., participants: _Optional[_Iterable[str]] = ..., run: _Optional[str] = ...) -> None: ...

class SendMessageRequestP2B(_message.Message):
    __slots__ = ("clientId", "topicName", "partitionId", "data", "flag", "checkSum", "sentAddr", "msgType", "msgTime", "authInfo", "batch", "producer", "transaction")
    CLIENTID_FIELD_NUMBER: _ClassVar[int]
    TOPICNAME_FIELD_NUMBER: _ClassVar[int]
    PARTITIONID_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    FLAG_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    SENTADDR_FIELD_NUMBER: _ClassVar[int]
    MSGTYPE_FIELD_NUMBER: _ClassVar[int]
    MSGTIME_FIELD_NUMBER: _ClassVar[int]
    AUTHINFO_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    TRANSACTION_FIELD_NUMBER: _ClassVar[int]
    clientId: str
    topicName: str
    partitionId: int
    data: bytes
    flag: int
    checkSum: int
    sentAddr: int
    msgType: str
    msgTime: str
    authInfo: _shared_pb2.AuthorizedInfo
    batch: SendBatch
    producer: ProducerSequence
    transaction: Transaction
    def __init__(self, clientId: _Optional[str] = ..., topicName: _Optional[str] = ..., partitionId: _Optional[int] = ..., data: _Optional[bytes] = ..., flag: _Optional[int] = ..., checkSum: _Optional[int] = ..., sentAddr: _Optional[int] = ..., msgType: _Optional[str] = ..., msgTime: _Optional[str] = ..., authInfo: _Optional[_Union[_shared_pb2.AuthorizedInfo, _Mapping[str, object]]] = ..., batch: _Optional[_Union[SendBatch, _Mapping[str, object]]] = ..., producer: _Optional[_Union[ProducerSequence, _Mapping[str, object]]] = ..., transaction: _Optional[_Union[Transaction, _Mapping[str, object]]] = ...) -> None: ...

class SendResult(_message.Message):
    __slots__ = ("extensions", "count", "duplicates", "expectedSequence")
    EXTENSIONS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    DUPLICATES_FIELD_NUMBER: _ClassVar[int]
    EXPECTEDSEQUENCE_FIELD_NUMBER: _ClassVar[int]
    extensions: int
    count: int
    duplicates: int
    expectedSequence: int
    def __init__(self, extensions: _Optional[int] = ..., count: _Optional[int] = ..., duplicates: _Optional[int] = ..., expectedSequence: _Optional[int] = ...) -> None: ...

class SendMessageResponseB2P(_message.Message):
    __slots__ = ("success", "errCode", "errMsg", "requireAuth", "messageId", "appendTime", "appendOffset", "result", "transaction")
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    ERRCODE_FIELD_NUMBER: _ClassVar[int]
    ERRMSG_FIELD_NUMBER: _ClassVar[int]
    REQUIREAUTH_FIELD_NUMBER: _ClassVar[int]
    MESSAGEID_FIELD_NUMBER: _ClassVar[int]
    APPENDTIME_FIELD_NUMBER: _ClassVar[int]
    APPENDOFFSET_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    TRANSACTION_FIELD_NUMBER: _ClassVar[int]
    success: bool
    errCode: int
    errMsg: str
    requireAuth: bool
    messageId: int
    appendTime: int
    appendOffset: int
    result: SendResult
    transaction: TransactionResult
    def __init__(self, success: bool = ..., errCode: _Optional[int] = ..., errMsg: _Optional[str] = ..., requireAuth: bool = ..., messageId: _Optional[int] = ..., appendTime: _Optional[int] = ..., appendOffset: _Optional[int] = ..., result: _Optional[_Union[SendResult, _Mapping[str, object]]] = ..., transaction: _Optional[_Union[TransactionResult, _Mapping[str, object]]] = ...) -> None: ...

class RegisterRequestC2B(_message.Message):
    __slots__ = ("opType", "clientId", "groupName", "topicName", "partitionId", "readStatus", "filterCondStr", "currOffset", "sessionKey", "sessionTime", "ssdStoreId", "qryPriorityId", "authInfo", "extensions", "sessionTimeoutMs")
    OPTYPE_FIELD_NUMBER: _ClassVar[int]
    CLIENTID_FIELD_NUMBER: _ClassVar[int]
    GROUPNAME_FIELD_NUMBER: _ClassVar[int]
    TOPICNAME_FIELD_NUMBER: _ClassVar[int]
    PARTITIONID_FIELD_NUMBER: _ClassVar[int]
    READSTATUS_FIELD_NUMBER: _ClassVar[int]
    FILTERCONDSTR_FIELD_NUMBER: _ClassVar[int]
    CURROFFSET_FIELD_NUMBER: _ClassVar[int]
    SESSIONKEY_FIELD_NUMBER: _ClassVar[int]
    SESSIONTIME_FIELD_NUMBER: _ClassVar[int]
    SSDSTOREID_FIELD_NUMBER: _ClassVar[int]
    QRYPRIORITYID_FIELD_NUMBER: _ClassVar[int]
    AUTHINFO_FIELD_NUMBER: _ClassVar[int]
    EXTENSIONS_FIELD_NUMBER: _ClassVar[int]
    SESSIONTIMEOUTMS_FIELD_NUMBER: _ClassVar[int]
    opType: int
    clientId: str
    groupName: str
    topicName: str
    partitionId: int
    readStatus: int
    filterCondStr: _containers.RepeatedScalarFieldContainer[str]
    currOffset: int
    sessionKey: str
    sessionTime: int
    ssdStoreId: int
    qryPriorityId: int
    authInfo: _shared_pb2.AuthorizedInfo
    extensions: int
    sessionTimeoutMs: int
    def __init__(self, opType: _Optional[int] = ..., clientId: _Optional[str] = ..., groupName: _Optional[str] = ..., topicName: _Optional[str] = ..., partitionId: _Optional[int] = ..., readStatus: _Optional[int] = ..., filterCondStr: _Optional[_Iterable[str]] = ..., currOffset: _Optional[int] = ..., sessionKey: _Optional[str] = ..., sessionTime: _Optional[int] = ..., ssdStoreId: _Optional[int] = ..., qryPriorityId: _Optional[int] = ..., authInfo: _Optional[_Union[_shared_pb2.AuthorizedInfo, _Mapping[str, object]]] = ..., extensions: _Optional[int] = ..., sessionTimeoutMs: _Optional[int] = ...) -> None: ...

class RegisterResponseB2C(_message.Message):
    __slots__ = ("success", "errCode", "errMsg", "currOffset", "maxOffset", "extensions")
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    ERRCODE_FIELD_NUMBER: _ClassVar[int]
    ERRMSG_FIELD_NUMBER: _ClassVar[int]
    CURROFFSET_FIELD_NUMBER: _ClassVar[int]
    MAXOFFSET_FIELD_NUMBER: _ClassVar[int]
    EXTENSIONS_FIELD_NUMBER: _ClassVar[int]
    success: bool
    errCode: int
    errMsg: str
    currOffset: int
    maxOffset: int
    extensions: int
    def __init__(self, success: bool = ..., errCode: _Optional[int] = ..., errMsg: _Optional[str] = ..., currOffset: _Optional[int] = ..., maxOffset: _Optional[int] = ..., extensions: _Optional[int] = ...) -> None: ...

class HeartBeatRequestC2B(_message.Message):
    __slots__ = ("clientId", "groupName", "readStatus", "partitionInfo", "ssdStoreId", "qryPriorityId", "authInfo")
    CLIENTID_FIELD_NUMBER: _ClassVar[int]
    GROUPNAME_FIELD_NUMBER: _ClassVar[int]
    READSTATUS_FIELD_NUMBER: _ClassVar[int]
    PARTITIONINFO_FIELD_NUMBER: _ClassVar[int]
    SSDSTOREID_FIELD_NUMBER: _ClassVar[int]
    QRYPRIORITYID_FIELD_NUMBER: _ClassVar[int]
    AUTHINFO_FIELD_NUMBER: _ClassVar[int]
    clientId: str
    groupName: str
    readStatus: int
    partitionInfo: _containers.RepeatedScalarFieldContainer[str]
    ssdStoreId: int
    qryPriorityId: int
    authInfo: _shared_pb2.AuthorizedInfo
    def __init__(self, clientId: _Optional[str] = ..., groupName: _Optional[str] = ..., readStatus: _Optional[int] = ..., partitionInfo: _Optional[_Iterable[str]] = ..., ssdStoreId: _Optional[int] = ..., qryPriorityId: _Optional[int] = ..., authInfo: _Optional[_Union[_shared_pb2.AuthorizedInfo, _Mapping[str, object]]] = ...) -> None: ...

class HeartBeatResponseB2C(_message.Message):
    __slots__ = ("success", "errCode", "errMsg", "hasPartFailure", "failureInfo", "requireAuth")
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    ERRCODE_FIELD_NUMBER: _ClassVar[int]
    ERRMSG_FIELD_NUMBER: _ClassVar[int]
    HASPARTFAILURE_FIELD_NUMBER: _ClassVar[int]
    FAILUREINFO_FIELD_NUMBER: _ClassVar[int]
    REQUIREAUTH_FIELD_NUMBER: _ClassVar[int]
    success: bool
    errCode: int
    errMsg: str
    hasPartFailure: bool
    failureInfo: _containers.RepeatedScalarFieldContainer[str]
    requireAuth: bool
    def __init__(self, success: bool = ..., errCode: _Optional[int] = ..., errMsg: _Optional[str] = ..., hasPartFailure: bool = ..., failureInfo: _Optional[_Iterable[str]] = ..., requireAuth: bool = ...) -> None: ...

class RangeRequest(_message.Message):
    __slots__ = ("startOffset", "endOffset", "maxMessages", "maxBytes", "planOnly", "timeMs", "logEpoch", "filterCondStr", "asColumns", "asStored")
    STARTOFFSET_FIELD_NUMBER: _ClassVar[int]
    ENDOFFSET_FIELD_NUMBER: _ClassVar[int]
    MAXMESSAGES_FIELD_NUMBER: _ClassVar[int]
    MAXBYTES_FIELD_NUMBER: _ClassVar[int]
    PLANONLY_FIELD_NUMBER: _ClassVar[int]
    TIMEMS_FIELD_NUMBER: _ClassVar[int]
    LOGEPOCH_FIELD_NUMBER: _ClassVar[int]
    FILTERCONDSTR_FIELD_NUMBER: _ClassVar[int]
    ASCOLUMNS_FIELD_NUMBER: _ClassVar[int]
    ASSTORED_FIELD_NUMBER: _ClassVar[int]
    startOffset: int
    endOffset: int
    maxMessages: int
    maxBytes: int
    planOnly: bool
    timeMs: int
    logEpoch: int
    filterCondStr: _containers.RepeatedScalarFieldContainer[str]
    asColumns: bool
    asStored: bool
    def __init__(self, startOffset: _Optional[int] = ..., endOffset: _Optional[int] = ..., maxMessages: _Optional[int] = ..., maxBytes: _Optional[int] = ..., planOnly: bool = ..., timeMs: _Optional[int] = ..., logEpoch: _Optional[int] = ..., filterCondStr: _Optional[_Iterable[str]] = ..., asColumns: bool = ..., asStored: bool = ...) -> None: ...

class RangeColumns(_message.Message):
    __slots__ = ("offsets", "appendTimes", "messageBytes", "checkSum", "positions")
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    APPENDTIMES_FIELD_NUMBER: _ClassVar[int]
    MESSAGEBYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    offsets: bytes
    appendTimes: bytes
    messageBytes: bytes
    checkSum: int
    positions: bytes
    def __init__(self, offsets: _Optional[bytes] = ..., appendTimes: _Optional[bytes] = ..., messageBytes: _Optional[bytes] = ..., checkSum: _Optional[int] = ..., positions: _Optional[bytes] = ...) -> None: ...

class RangeResponse(_message.Message):
    __slots__ = ("nextOffset", "messageOffsets", "appendTimes", "minOffset", "maxOffset", "messageCount", "lostStart", "lostEnd", "timeOffset", "logEpoch", "truncatedTo", "columns")
    NEXTOFFSET_FIELD_NUMBER: _ClassVar[int]
    MESSAGEOFFSETS_FIELD_NUMBER: _ClassVar[int]
    APPENDTIMES_FIELD_NUMBER: _ClassVar[int]
    MINOFFSET_FIELD_NUMBER: _ClassVar[int]
    MAXOFFSET_FIELD_NUMBER: _ClassVar[int]
    MESSAGECOUNT_FIELD_NUMBER: _ClassVar[int]
    LOSTSTART_FIELD_NUMBER: _ClassVar[int]
    LOSTEND_FIELD_NUMBER: _ClassVar[int]
    TIMEOFFSET_FIELD_NUMBER: _ClassVar[int]
    LOGEPOCH_FIELD_NUMBER: _ClassVar[int]
    TRUNCATEDTO_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    nextOffset: int
    messageOffsets: _containers.RepeatedScalarFieldContainer[int]
    appendTimes: _containers.RepeatedScalarFieldContainer[int]
    minOffset: int
    maxOffset: int
    messageCount: int
    lostStart: int
    lostEnd: int
    timeOffset: int
    logEpoch: int
    truncatedTo: int
    columns: RangeColumns
    def __init__(self, nextOffset: _Optional[int] = ..., messageOffsets: _Optional[_Iterable[int]] = ..., appendTimes: _Optional[_Iterable[int]] = ..., minOffset: _Optional[int] = ..., maxOffset: _Optional[int] = ..., messageCount: _Optional[int] = ..., lostStart: _Optional[int] = ..., lostEnd: _Optional[int] = ..., timeOffset: _Optional[int] = ..., logEpoch: _Optional[int] = ..., truncatedTo: _Optional[int] = ..., columns: _Optional[_Union[RangeColumns, _Mapping[str, object]]] = ...) -> None: ...

class GetMessageRequestC2B(_message.Message):
    __slots__ = ("clientId", "partitionId", "groupName", "topicName", "lastPackConsumed", "manualCommitOffset", "escFlowCtrl", "range", "maxWaitMs", "wantOffsets", "authInfo")
    CLIENTID_FIELD_NUMBER: _ClassVar[int]
    PARTITIONID_FIELD_NUMBER: _ClassVar[int]
    GROUPNAME_FIELD_NUMBER: _ClassVar[int]
    TOPICNAME_FIELD_NUMBER: _ClassVar[int]
    LASTPACKCONSUMED_FIELD_NUMBER: _ClassVar[int]
    MANUALCOMMITOFFSET_FIELD_NUMBER: _ClassVar[int]
    ESCFLOWCTRL_FIELD_NUMBER: _ClassVar[int]
    RANGE_FIELD_NUMBER: _ClassVar[int]
    MAXWAITMS_FIELD_NUMBER: _ClassVar[int]
    WANTOFFSETS_FIELD_NUMBER: _ClassVar[int]
    AUTHINFO_FIELD_NUMBER: _ClassVar[int]
    clientId: str
    partitionId: int
    groupName: str
    topicName: str
    lastPackConsumed: bool
    manualCommitOffset: bool
    escFlowCtrl: bool
    range: RangeRequest
    maxWaitMs: int
    wantOffsets: bool
    authInfo: _shared_pb2.AuthorizedInfo
    def __init__(self, clientId: _Optional[str] = ..., partitionId: _Optional[int] = ..., groupName: _Optional[str] = ..., topicName: _Optional[str] = ..., lastPackConsumed: bool = ..., manualCommitOffset: bool = ..., escFlowCtrl: bool = ..., range: _Optional[_Union[RangeRequest, _Mapping[str, object]]] = ..., maxWaitMs: _Optional[int] = ..., wantOffsets: bool = ..., authInfo: _Optional[_Union[_shared_pb2.AuthorizedInfo, _Mapping[str, object]]] = ...) -> None: ...

class TransferedMessage(_message.Message):
    __slots__ = ("messageId", "checkSum", "payLoadData", "flag", "producerId", "sequence", "batchCount")
    MESSAGEID_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    PAYLOADDATA_FIELD_NUMBER: _ClassVar[int]
    FLAG_FIELD_NUMBER: _ClassVar[int]
    PRODUCERID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    BATCHCOUNT_FIELD_NUMBER: _ClassVar[int]
    messageId: int
    checkSum: int
    payLoadData: bytes
    flag: int
    producerId: int
    sequence: int
    batchCount: int
    def __init__(self, messageId: _Optional[int] = ..., checkSum: _Optional[int] = ..., payLoadData: _Optional[bytes] = ..., flag: _Optional[int] = ..., producerId: _Optional[int] = ..., sequence: _Optional[int] = ..., batchCount: _Optional[int] = ...) -> None: ...

class GetMessageResponseB2C(_message.Message):
    __slots__ = ("success", "errCode", "errMsg", "messages", "currOffset", "minLimitTime", "escFlowCtrl", "currDataDlt", "requireSlow", "maxOffset", "range", "records")
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    ERRCODE_FIELD_NUMBER: _ClassVar[int]
    ERRMSG_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    CURROFFSET_FIELD_NUMBER: _ClassVar[int]
    MINLIMITTIME_FIELD_NUMBER: _ClassVar[int]
    ESCFLOWCTRL_FIELD_NUMBER: _ClassVar[int]
    CURRDATADLT_FIELD_NUMBER: _ClassVar[int]
    REQUIRESLOW_FIELD_NUMBER: _ClassVar[int]
    MAXOFFSET_FIELD_NUMBER: _ClassVar[int]
    RANGE_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    success: bool
    errCode: int
    errMsg: str
    messages: _containers.RepeatedCompositeFieldContainer[TransferedMessage]
    currOffset: int
    minLimitTime: int
    escFlowCtrl: bool
    currDataDlt: int
    requireSlow: bool
    maxOffset: int
    range: RangeResponse
    records: bytes
    def __init__(self, success: bool = ..., errCode: _Optional[int] = ..., errMsg: _Optional[str] = ..., messages: _Optional[_Iterable[_Union[TransferedMessage, _Mapping[str, object]]]] = ..., currOffset: _Optional[int] = ..., minLimitTime: _Optional[int] = ..., escFlowCtrl: bool = ..., currDataDlt: _Optional[int] = ..., requireSlow: bool = ..., maxOffset: _Optional[int] = ..., range: _Optional[_Union[RangeResponse, _Mapping[str, object]]] = ..., records: _Optional[bytes] = ...) -> None: ...

class CommitOffsetRequestC2B(_message.Message):
    __slots__ = ("clientId", "topicName", "partitionId", "groupName", "lastPackConsumed", "confirmedOffset")
    CLIENTID_FIELD_NUMBER: _ClassVar[int]
    TOPICNAME_FIELD_NUMBER: _ClassVar[int]
    PARTITIONID_FIELD_NUMBER: _ClassVar[int]
    GROUPNAME_FIELD_NUMBER: _ClassVar[int]
    LASTPACKCONSUMED_FIELD_NUMBER: _ClassVar[int]
    CONFIRMEDOFFSET_FIELD_NUMBER: _ClassVar[int]
    clientId: str
    topicName: str
    partitionId: int
    groupName: str
    lastPackConsumed: bool
    confirmedOffset: int
    def __init__(self, clientId: _Optional[str] = ..., topicName: _Optional[str] = ..., partitionId: _Optional[int] = ..., groupName: _Optional[str] = ..., lastPackConsumed: bool = ..., confirmedOffset: _Optional[int] = ...) -> None: ...

class CommitOffsetResponseB2C(_message.Message):
    __slots__ = ("success", "errCode", "errMsg", "currOffset", "maxOffset")
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    ERRCODE_FIELD_NUMBER: _ClassVar[int]
    ERRMSG_FIELD_NUMBER: _ClassVar[int]
    CURROFFSET_FIELD_NUMBER: _ClassVar[int]
    MAXOFFSET_FIELD_NUMBER: _ClassVar[int]
    success: bool
    errCode: int
    errMsg: str
    currOffset: int
    maxOffset: int
    def __init__(self, success: bool = ..., errCode: _Optional[int] = ..., errMsg: _Optional[str] = ..., currOffset: _Optional[int] = ..., maxOffset: _Optional[int] = ...) -> None: ...
