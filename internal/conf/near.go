package conf

import (
	"strings"
	"unicode/utf8"
)

// Nearest returns the name that resembles written, "" if none does. Spellings
// such as tokenFile, token-file and token_file are equal.
func Nearest(written string, names []string) string {
	if len(written) > 100 {
		return ""
	}
	best, least := "", 1+max(1, min(3, len(written)/3))
	for _, name := range names {
		if d := Distance(fold(written), fold(name), least-1); d < least {
			best, least = name, d
		}
	}
	return best
}

func fold(s string) string {
	return strings.ToLower(strings.NewReplacer("_", "", "-", "").Replace(s))
}

// Distance is the number of insertions, deletions, replacements and
// transpositions of letters between a and b, or more than limit if it exceeds
// that.
func Distance(a, b string, limit int) int {
	if n := utf8.RuneCountInString(a) - utf8.RuneCountInString(b); max(n, -n) > limit {
		return limit + 1
	}
	x, y := []rune(a), []rune(b)
	before, last, row := make([]int, len(y)+1), make([]int, len(y)+1), make([]int, len(y)+1)
	for j := range row {
		row[j] = j
	}
	for i := 1; i <= len(x); i++ {
		before, last, row = last, row, before
		row[0] = i
		for j := 1; j <= len(y); j++ {
			cost := 1
			if x[i-1] == y[j-1] {
				cost = 0
			}
			row[j] = min(last[j]+1, row[j-1]+1, last[j-1]+cost)
			if i > 1 && j > 1 && x[i-1] == y[j-2] && x[i-2] == y[j-1] {
				row[j] = min(row[j], before[j-2]+1)
			}
		}
	}
	return row[len(y)]
}
