"""Layout of generated Python: expressions are written as text, and broken into lines by their syntax trees.

Only the nodes that generated programs contain are supported. The result has the layout of common formatters: a call
that does not fit on a line has an argument per line, and a chain of methods a call per line.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator

__all__ = ["WIDTH", "docstring", "literal_text", "statement"]

WIDTH = 100
"""Maximum length of a line, unless a text is longer."""


def literal_text(value: object) -> str:
    """Return Python for ``value``, with double quotes around a text."""
    if not isinstance(value, str):
        return repr(value)
    if '"' in value and "'" not in value:
        return repr(value)
    quoted = json.dumps(value, ensure_ascii=False)
    # JSON has escapes of its own for other characters than quotes, backslashes and line breaks.
    return quoted if ast.literal_eval(quoted) == value else repr(value)


def docstring(text: str, indent: int = 0) -> list[str]:
    """Return ``text`` as lines of a docstring."""
    space = " " * indent
    safe = text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    lines = safe.split("\n")
    if len(lines) == 1:
        ended = f"{lines[0]} " if lines[0].endswith('"') else lines[0]
        return [f'{space}"""{ended}"""']
    return [f'{space}"""{lines[0]}', *(f"{space}{line}".rstrip() for line in lines[1:]), f'{space}"""']


def statement(text: str, indent: int = 4) -> list[str]:
    """Return a statement, an assignment, a return or an expression, as lines with ``indent`` spaces."""
    (node,) = ast.parse(text).body
    prefix, value = "", None
    if isinstance(node, ast.Assign):
        prefix, value = f"{ast.unparse(node.targets[0])} = ", node.value
    elif isinstance(node, ast.Return):
        prefix, value = "return ", node.value
    elif isinstance(node, ast.Expr):
        value = node.value
    assert value is not None, "generated programs have no other statements with long lines"
    space = " " * indent
    if len(space + prefix + _flat(value)) <= WIDTH:
        return [space + prefix + _flat(value)]
    links = _chain(value)
    if len(links) > 2:
        first, *rest = links
        inner = space + "    "
        if len(inner + _flat(value)) <= WIDTH:
            return [f"{space}{prefix}(", inner + _flat(value), f"{space})"]
        lines = [f"{space}{prefix}(", *_broken_link(inner, *first)]
        for link in rest:
            lines += _broken_link(inner, *link)
        return [*lines, f"{space})"]
    return _broken(space + prefix, value, "", indent)


_Link = tuple[str, ast.Call]


def _chain(node: ast.expr) -> list[_Link]:
    """Return a chain of method calls as the beginning of each line and its call; the first includes the object."""
    calls: list[ast.Call] = []
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        calls.insert(0, node)
        node = node.func.value
        while isinstance(node, ast.Attribute):
            node = node.value
    links: list[_Link] = []
    if isinstance(node, ast.Call):
        links.append((_flat(node.func), node))
    for number, call in enumerate(calls):
        assert isinstance(call.func, ast.Attribute)
        before = calls[number - 1] if number else node
        head = f".{_attributes(call.func, before)}" if links else _flat(call.func)
        links.append((head, call))
    return links


def _attributes(function: ast.Attribute, before: ast.expr) -> str:
    """Return the attributes between the call ``before`` and a call, with dots."""
    names = [function.attr]
    value = function.value
    while value is not before:
        assert isinstance(value, ast.Attribute)
        names.insert(0, value.attr)
        value = value.value
    return ".".join(names)


def _broken_link(space: str, head: str, call: ast.Call) -> list[str]:
    flat = f"{space}{head}({', '.join(_arguments(call))})"
    return [flat] if len(flat) <= WIDTH else _opened(f"{space}{head}(", call, ")", len(space))


def _broken(head: str, node: ast.expr, tail: str, indent: int) -> list[str]:
    """Return lines for ``node`` after ``head`` (with its spaces), followed by ``tail``."""
    flat = head + _flat(node) + tail
    if len(flat) <= WIDTH:
        return [flat]
    if isinstance(node, ast.Call) and (node.args or node.keywords):
        function = node.func
        is_long = len(f"{head}{_flat(function)}(") > WIDTH
        if is_long and isinstance(function, ast.Attribute) and isinstance(function.value, ast.Call):
            # The arguments of the call before it are opened instead.
            return _broken(head, function.value, f".{function.attr}({', '.join(_arguments(node))}){tail}", indent)
        return _opened(f"{head}{_flat(node.func)}(", node, f"){tail}", indent)
    if isinstance(node, ast.List | ast.Dict) and _items(node):
        opening, closing = ("[", "]") if isinstance(node, ast.List) else ("{", "}")
        lines = [f"{head}{opening}"]
        for name, value in _items(node):
            lines += _broken(f"{' ' * (indent + 4)}{name}", value, ",", indent + 4)
        return [*lines, f"{' ' * indent}{closing}{tail}"]
    return [flat]


def _opened(head: str, call: ast.Call, tail: str, indent: int) -> list[str]:
    """Return a call with an argument per line, or all of them on one line if they fit."""
    space = " " * (indent + 4)
    together = space + ", ".join(_arguments(call))
    closing = f"{' ' * indent}{tail}"
    pieces: list[tuple[str, ast.expr]] = [("", each) for each in call.args]
    pieces += [("**" if each.arg is None else f"{each.arg}=", each.value) for each in call.keywords]
    if len(together) <= WIDTH:
        return [head, together, closing]
    lines = [head]
    for name, value in pieces:
        lines += _broken(f"{space}{name}", value, ",", indent + 4)
    return [*lines, closing]


def _items(node: ast.List | ast.Dict) -> list[tuple[str, ast.expr]]:
    if isinstance(node, ast.List):
        return [("", each) for each in node.elts]
    found: list[tuple[str, ast.expr]] = []
    for key, value in zip(node.keys, node.values, strict=True):
        assert key is not None
        found.append((f"{_flat(key)}: ", value))
    return found


def _arguments(call: ast.Call) -> Iterator[str]:
    yield from map(_flat, call.args)
    for each in call.keywords:
        yield f"**{_flat(each.value)}" if each.arg is None else f"{each.arg}={_flat(each.value)}"


def _flat(node: ast.expr) -> str:
    """Return ``node`` on one line."""
    match node:
        case ast.Constant(value=value):
            return literal_text(value)
        case ast.Attribute(value=value, attr=name):
            return f"{_flat(value)}.{name}"
        case ast.Call(func=function):
            return f"{_flat(function)}({', '.join(_arguments(node))})"
        case ast.List(elts=items):
            return f"[{', '.join(map(_flat, items))}]"
        case ast.Dict():
            return "{" + ", ".join(f"{key}{_flat(value)}" for key, value in _items(node)) + "}"
        case ast.Starred(value=value):
            return f"*{_flat(value)}"
        case ast.Subscript(value=value, slice=index):
            return f"{_flat(value)}[{_flat(index)}]"
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return f"~{_operand(operand)}"
        case ast.BinOp(left=left, op=operator, right=right):
            return f"{_operand(left)} {_OPERATORS[type(operator)]} {_operand(right)}"
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            return f"{_operand(left)} {_OPERATORS[type(operator)]} {_operand(right)}"
        case ast.IfExp(test=test, body=body, orelse=other):
            return f"{_flat(body)} if {_flat(test)} else {_flat(other)}"
        case ast.Lambda(args=arguments, body=body):
            return f"lambda {', '.join(each.arg for each in arguments.args)}: {_flat(body)}"
        case ast.JoinedStr():
            inner = "".join(_part(each) for each in node.values)
            return f'f"{inner}"'
        case _:
            # Names. Texts inside of other nodes keep the quotes of `ast`.
            return ast.unparse(node)


def _part(node: ast.expr) -> str:
    if isinstance(node, ast.FormattedValue):
        return "{" + ast.unparse(node.value) + "}"
    assert isinstance(node, ast.Constant)
    return re.sub(r'(["\\])', r"\\\1", str(node.value)).replace("{", "{{").replace("}", "}}")


def _operand(node: ast.expr) -> str:
    flat = _flat(node)
    same = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)
    return f"({flat})" if isinstance(node, ast.BinOp | ast.Compare | ast.Lambda) and not same else flat


_OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.BitAnd: "&", ast.BitOr: "|", ast.Div: "/",
    ast.Eq: "==", ast.NotEq: "!=", ast.Gt: ">", ast.GtE: ">=", ast.Lt: "<", ast.LtE: "<=", ast.In: "in",
}  # fmt: skip
