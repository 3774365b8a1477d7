"""Grammars for `token_mask`, by the import path that pages name."""

from paged.serving.grammar.structured import GrammarCompiler as GrammarCompiler
