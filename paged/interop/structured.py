"""Grammars for `token_mask`, at the documented import path."""

from paged.serving.grammar.structured import GrammarCompiler as GrammarCompiler
