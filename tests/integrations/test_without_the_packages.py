"""Integrations say how to install missing packages, and `import fakequant` does not import them."""

import subprocess
import sys

PACKAGES = ["transformers", "accelerate", "lightning", "lightning.pytorch", "pytorch_lightning"]
IMPORT = f"""
import sys
sys.modules.update(dict.fromkeys({PACKAGES}, None))
for name in ("transformers", "lightning"):
    try:
        __import__("fakequant.integrations." + name)
    except ImportError as error:
        print(error)
"""


def output_of(code):
    return subprocess.check_output([sys.executable, "-c", code], text=True)


def test_integrations_without_their_packages_name_the_install_command():
    assert output_of(IMPORT).splitlines() == [
        "This needs transformers, which is not installed.",
        'Use: pip install "fakequant[transformers]"',
        "This needs lightning, which is not installed.",
        'Use: pip install "fakequant[lightning]"',
    ]


def test_importing_fakequant_imports_no_integration_package():
    code = "import sys, fakequant as fq; fq.prepare, fq.Schedule, fq.health, fq.nn; import fakequant.integrations; "
    assert output_of(f"{code}print(sorted({set(PACKAGES)} & sys.modules.keys()))").strip() == "[]"
