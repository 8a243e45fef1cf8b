"""Packaging for tinylm. Every name, version and requirement is read from settings.ini."""
from configparser import ConfigParser
from pathlib import Path

from setuptools import setup

here = Path(__file__).parent
settings = ConfigParser(delimiters=["="])
settings.read(here / "settings.ini", encoding="utf-8")
cfg = settings["DEFAULT"]

setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=cfg["author"],
    author_email=cfg["author_email"],
    url=cfg["git_url"],
    license=cfg["license"],
    keywords=cfg["keywords"].split(),
    packages=[cfg["lib_path"]],
    python_requires=f">={cfg['min_python']}",
    install_requires=cfg["requirements"].split(),
    extras_require={"dev": cfg["dev_requirements"].split()},
    entry_points={"console_scripts": cfg["console_scripts"].split()},
)
