"""The public signatures: what type checkers see of them, and that none of them says Any."""

import inspect
import re

import typing_extensions

import linattn
import typed_calls


def test_what_type_checkers_see_runs_too():
    typed_calls.calls()


def _public_callables():
    modules = [linattn, linattn.kernels, linattn.nn, linattn.measure, linattn.hf, linattn.parallel]
    for module in modules:
        for name in module.__all__:
            found = getattr(module, name)
            if inspect.isfunction(found):
                for one in (found, *typing_extensions.get_overloads(found)):
                    yield f"{module.__name__}.{name}", one
            elif inspect.isclass(found) and found.__module__.startswith("linattn"):
                members = {**vars(found), "__init__": found.__init__}
                for member, value in members.items():
                    function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
                    function = function.fget if isinstance(function, property) else function
                    public = not member.startswith("_") or member == "__init__"
                    if public and inspect.isfunction(function) and function.__module__.startswith("linattn"):
                        yield f"{module.__name__}.{name}.{member}", function


def test_no_public_signature_says_any():
    guilty = []
    for name, function in _public_callables():
        for argument, kind in function.__annotations__.items():  # a class, a type or words: "Any" stands in all of them
            if re.search(r"\bAny\b", str(kind)):
                guilty.append(f"{name}({argument})")
    assert guilty == []
