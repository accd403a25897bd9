"""What a client can't have an engine do past the router. test_validation.py has the fields of requests, one by one."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from serving.router.http.steering import TOKENIZER_ARGUMENTS

pytestmark = pytest.mark.unit


def test_every_argument_of_a_tokenizer_that_is_no_template_s_stays_out_of_chat_template_kwargs() -> None:
    """As the installed transformers has them: vLLM hands each of them on."""
    package = find_spec("transformers")
    assert package is not None
    assert package.origin is not None
    module = ast.parse(Path(package.origin).with_name("tokenization_utils_base.py").read_text())
    apply = next(
        node
        for node in ast.walk(module)
        if isinstance(node, ast.FunctionDef) and node.name == "apply_chat_template"
    )
    of_templates = {"tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message"}
    names = {argument.arg for argument in (*apply.args.args, *apply.args.kwonlyargs)} - {"self"}
    assert names - of_templates == set(TOKENIZER_ARGUMENTS)
