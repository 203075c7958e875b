// Package clip bounds what others can write into logs, pages and messages.
package clip

import (
	"strings"
	"unicode/utf8"
)

// Text returns s as valid UTF-8, as messages on the wire require, of at most
// limit bytes. Truncated text ends in "...".
func Text(s string, limit int) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if len(s) <= limit {
		return s
	}
	const dots = "..."
	cut := limit - len(dots)
	for cut > 0 && !utf8.RuneStart(s[cut]) {
		cut--
	}
	return s[:cut] + dots
}
