"""Only what pyproject.toml can't say in a stable way: the copy kernel is optional. Without a compiler NumPy copies."""

from setuptools import Extension, setup

setup(ext_modules=[Extension("pdxfer._native", ["pdxfer/_native.c"], extra_compile_args=["-O3"], optional=True)])
