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


def test_integrations_name_the_install_command_and_fakequant_imports_none_of_their_packages():
    first = "import sys, fakequant as fq; fq.prepare, fq.Schedule, fq.health, fq.nn; import fakequant.integrations\n"
    first += f"print(sorted({set(PACKAGES)} & sys.modules.keys()))"
    printed = subprocess.check_output([sys.executable, "-c", first + IMPORT], text=True)
    assert printed.splitlines() == [
        "[]",
        "This needs transformers, which is not installed.",
        'Use: pip install "fakequant[transformers]"',
        "This needs lightning, which is not installed.",
        'Use: pip install "fakequant[lightning]"',
    ]
