from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DataSet(_message.Message):
    __slots__ = ("num_of_columns", "columns", "types", "rows")
    class Value(_message.Message):
        __slots__ = ("int_value", "long_value", "float_value", "double_value", "boolean_value", "string_value")
        INT_VALUE_FIELD_NUMBER: _ClassVar[int]
        LONG_VALUE_FIELD_NUMBER: _ClassVar[int]
        FLOAT_VALUE_FIELD_NUMBER: _ClassVar[int]
        DOUBLE_VALUE_FIELD_NUMBER: _ClassVar[int]
        BOOLEAN_VALUE_FIELD_NUMBER: _ClassVar[int]
        STRING_VALUE_FIELD_NUMBER: _ClassVar[int]
        int_value: int
        long_value: int
        float_value: float
        double_value: float
        boolean_value: bool
        string_value: str
        def __init__(self, int_value: _Optional[int] = ..., long_value: _Optional[int] = ..., float_value: _Optional[float] = ..., double_value: _Optional[float] = ..., boolean_value: bool = ..., string_value: _Optional[str] = ...) -> None: ...
    class Row(_message.Message):
        __slots__ = ("elements",)
        ELEMENTS_FIELD_NUMBER: _ClassVar[int]
        elements: _containers.RepeatedCompositeFieldContainer[DataSet.Value]
        def __init__(self, elements: _Optional[_Iterable[_Union[DataSet.Value, _Mapping[str, object]]]] = ...) -> None: ...
    NUM_OF_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    TYPES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    num_of_columns: int
    columns: _containers.RepeatedScalarFieldContainer[str]
    types: _containers.RepeatedScalarFieldContainer[int]
    rows: _containers.RepeatedCompositeFieldContainer[DataSet.Row]
    def __init__(self, num_of_columns: _Optional[int] = ..., columns: _Optional[_Iterable[str]] = ..., types: _Optional[_Iterable[int]] = ..., rows: _Optional[_Iterable[_Union[DataSet.Row, _Mapping[str, object]]]] = ...) -> None: ...

class Template(_message.Message):
    __slots__ = ("version", "metrics", "parameters", "template_ref", "is_definition")
    class Parameter(_message.Message):
        __slots__ = ("name", "type", "int_value", "long_value", "float_value", "double_value", "boolean_value", "string_value")
        NAME_FIELD_NUMBER: _ClassVar[int]
        TYPE_FIELD_NUMBER: _ClassVar[int]
        INT_VALUE_FIELD_NUMBER: _ClassVar[int]
        LONG_VALUE_FIELD_NUMBER: _ClassVar[int]
        FLOAT_VALUE_FIELD_NUMBER: _ClassVar[int]
        DOUBLE_VALUE_FIELD_NUMBER: _ClassVar[int]
        BOOLEAN_VALUE_FIELD_NUMBER: _ClassVar[int]
        STRING_VALUE_FIELD_NUMBER: _ClassVar[int]
        name: str
        type: int
        int_value: int
        long_value: int
        float_value: float
        double_value: float
        boolean_value: bool
        string_value: str
        def __init__(self, name: _Optional[str] = ..., type: _Optional[int] = ..., int_value: _Optional[int] = ..., long_value: _Optional[int] = ..., float_value: _Optional[float] = ..., double_value: _Optional[float] = ..., boolean_value: bool = ..., string_value: _Optional[str] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_REF_FIELD_NUMBER: _ClassVar[int]
    IS_DEFINITION_FIELD_NUMBER: _ClassVar[int]
    version: str
    metrics: _containers.RepeatedCompositeFieldContainer[Metric]
    parameters: _containers.RepeatedCompositeFieldContainer[Template.Parameter]
    template_ref: str
    is_definition: bool
    def __init__(self, version: _Optional[str] = ..., metrics: _Optional[_Iterable[_Union[Metric, _Mapping[str, object]]]] = ..., parameters: _Optional[_Iterable[_Union[Template.Parameter, _Mapping[str, object]]]] = ..., template_ref: _Optional[str] = ..., is_definition: bool = ...) -> None: ...

class PropertySet(_message.Message):
    __slots__ = ("keys", "values")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[str]
    values: _containers.RepeatedCompositeFieldContainer[PropertyValue]
    def __init__(self, keys: _Optional[_Iterable[str]] = ..., values: _Optional[_Iterable[_Union[PropertyValue, _Mapping[str, object]]]] = ...) -> None: ...

class PropertySetList(_message.Message):
    __slots__ = ("propertyset",)
    PROPERTYSET_FIELD_NUMBER: _ClassVar[int]
    propertyset: _containers.RepeatedCompositeFieldContainer[PropertySet]
    def __init__(self, propertyset: _Optional[_Iterable[_Union[PropertySet, _Mapping[str, object]]]] = ...) -> None: ...

class PropertyValue(_message.Message):
    __slots__ = ("type", "is_null", "int_value", "long_value", "float_value", "double_value", "boolean_value", "string_value", "propertyset_value", "propertysets_value")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    IS_NULL_FIELD_NUMBER: _ClassVar[int]
    INT_VALUE_FIELD_NUMBER: _ClassVar[int]
    LONG_VALUE_FIELD_NUMBER: _ClassVar[int]
    FLOAT_VALUE_FIELD_NUMBER: _ClassVar[int]
    DOUBLE_VALUE_FIELD_NUMBER: _ClassVar[int]
    BOOLEAN_VALUE_FIELD_NUMBER: _ClassVar[int]
    STRING_VALUE_FIELD_NUMBER: _ClassVar[int]
    PROPERTYSET_VALUE_FIELD_NUMBER: _ClassVar[int]
    PROPERTYSETS_VALUE_FIELD_NUMBER: _ClassVar[int]
    type: int
    is_null: bool
    int_value: int
    long_value: int
    float_value: float
    double_value: float
    boolean_value: bool
    string_value: str
    propertyset_value: PropertySet
    propertysets_value: PropertySetList
    def __init__(self, type: _Optional[int] = ..., is_null: bool = ..., int_value: _Optional[int] = ..., long_value: _Optional[int] = ..., float_value: _Optional[float] = ..., double_value: _Optional[float] = ..., boolean_value: bool = ..., string_value: _Optional[str] = ..., propertyset_value: _Optional[_Union[PropertySet, _Mapping[str, object]]] = ..., propertysets_value: _Optional[_Union[PropertySetList, _Mapping[str, object]]] = ...) -> None: ...

class Metric(_message.Message):
    __slots__ = ("name", "alias", "timestamp", "datatype", "is_historical", "is_transient", "is_null", "properties", "int_value", "long_value", "float_value", "double_value", "boolean_value", "string_value", "bytes_value", "dataset_value", "template_value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    DATATYPE_FIELD_NUMBER: _ClassVar[int]
    IS_HISTORICAL_FIELD_NUMBER: _ClassVar[int]
    IS_TRANSIENT_FIELD_NUMBER: _ClassVar[int]
    IS_NULL_FIELD_NUMBER: _ClassVar[int]
    PROPERTIES_FIELD_NUMBER: _ClassVar[int]
    INT_VALUE_FIELD_NUMBER: _ClassVar[int]
    LONG_VALUE_FIELD_NUMBER: _ClassVar[int]
    FLOAT_VALUE_FIELD_NUMBER: _ClassVar[int]
    DOUBLE_VALUE_FIELD_NUMBER: _ClassVar[int]
    BOOLEAN_VALUE_FIELD_NUMBER: _ClassVar[int]
    STRING_VALUE_FIELD_NUMBER: _ClassVar[int]
    BYTES_VALUE_FIELD_NUMBER: _ClassVar[int]
    DATASET_VALUE_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    alias: int
    timestamp: int
    datatype: int
    is_historical: bool
    is_transient: bool
    is_null: bool
    properties: PropertySet
    int_value: int
    long_value: int
    float_value: float
    double_value: float
    boolean_value: bool
    string_value: str
    bytes_value: bytes
    dataset_value: DataSet
    template_value: Template
    def __init__(self, name: _Optional[str] = ..., alias: _Optional[int] = ..., timestamp: _Optional[int] = ..., datatype: _Optional[int] = ..., is_historical: bool = ..., is_transient: bool = ..., is_null: bool = ..., properties: _Optional[_Union[PropertySet, _Mapping[str, object]]] = ..., int_value: _Optional[int] = ..., long_value: _Optional[int] = ..., float_value: _Optional[float] = ..., double_value: _Optional[float] = ..., boolean_value: bool = ..., string_value: _Optional[str] = ..., bytes_value: _Optional[bytes] = ..., dataset_value: _Optional[_Union[DataSet, _Mapping[str, object]]] = ..., template_value: _Optional[_Union[Template, _Mapping[str, object]]] = ...) -> None: ...

class Payload(_message.Message):
    __slots__ = ("timestamp", "metrics", "seq")
    TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    timestamp: int
    metrics: _containers.RepeatedCompositeFieldContainer[Metric]
    seq: int
    def __init__(self, timestamp: _Optional[int] = ..., metrics: _Optional[_Iterable[_Union[Metric, _Mapping[str, object]]]] = ..., seq: _Optional[int] = ...) -> None: ...
