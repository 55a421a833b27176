"""The search of the site: English words, and Chinese ones sign by sign.

Chinese is written without spaces, so an index of words has whole sentences as words. Here every
sign is one: who looks for 梯度 finds the pages that have both.
"""

from __future__ import annotations

import re

from sphinx.search.en import SearchEnglish

WORD = re.compile(r"[\u3400-\u9fff]|[^\W\u3400-\u9fff]+")


class SearchWithChinese(SearchEnglish):
    """English, with each Chinese sign a word of its own, in the index and in what is asked."""

    js_splitter_code = """
var splitQuery = (query) =>
  query.match(/[\\u3400-\\u9fff]|(?:(?![\\u3400-\\u9fff])[\\p{L}\\p{N}_])+/gu) ?? [];
"""

    def split(self, input: str) -> list[str]:
        return WORD.findall(input)
