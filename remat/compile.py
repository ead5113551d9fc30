"""What the compiler says of a function, and options for it. Lives in `remat.compiler.compile`."""

from remat.compiler.compile import (
    CPU_COMPILER_OPTIONS,
    CompileReport,
    compile_report,
    compiler_options,
)

__all__ = ["CPU_COMPILER_OPTIONS", "CompileReport", "compile_report", "compiler_options"]
