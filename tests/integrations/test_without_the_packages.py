"""Without the libraries, the callbacks say how to get them; `import fakequant` never imports these."""

import subprocess
import sys

import pytest


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("module", "missing", "package", "extra"),
    [
        ("transformers", ["transformers"], "transformers", "transformers"),
        ("transformers", ["accelerate", "accelerate.utils"], "accelerate", "transformers"),
        ("lightning", ["lightning", "lightning.pytorch", "pytorch_lightning"], "lightning", "lightning"),
    ],
    ids=["transformers", "accelerate", "lightning"],
)
def test_says_how_to_install_it(module, missing, package, extra):
    if module == "transformers" and package != "transformers":
        pytest.importorskip("transformers")
    ran = run(f"import sys; sys.modules.update(dict.fromkeys({missing}, None)); import fakequant.integrations.{module}")
    assert ran.returncode == 1
    assert f"ImportError: This needs {package}, which is not installed." in ran.stderr
    assert f'Use: pip install "fakequant[{extra}]"' in ran.stderr


def test_the_library_imports_neither():
    ran = run(
        "import sys, fakequant as fq; fq.prepare, fq.Schedule, fq.health, fq.nn; import fakequant.integrations; "
        "print(sorted({'transformers', 'accelerate', 'lightning', 'pytorch_lightning'} & sys.modules.keys()))"
    )
    assert ran.stdout.strip() == "[]", ran.stderr
