package translate

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// selector is a label selector in Kubernetes syntax; all requirements must
// hold. The empty one selects everything.
type selector []requirement

// requirement is one part of a selector: key in values, key notin values, or,
// without values, that the key exists.
type requirement struct {
	key    string
	values []string
	not    bool
}

func (s selector) matches(labels map[string]string) bool {
	for _, r := range s {
		v, ok := labels[r.key]
		if r.values != nil {
			ok = ok && slices.Contains(r.values, v)
		}
		if ok == r.not {
			return false
		}
	}
	return true
}

// parseSelector parses "a=1,b!=2,c in (x,y),d notin (z),e,!f".
func parseSelector(text string) (selector, error) {
	var out selector
	for rest := strings.TrimSpace(text); rest != ""; {
		r, after, err := parseRequirement(rest)
		if err != nil {
			return nil, fmt.Errorf("%s is not a selector: %w; write it like version in (v1,v2),!canary,team=blue", quote(text), err)
		}
		out = append(out, r)
		if after == "" {
			break
		}
		if rest = strings.TrimSpace(strings.TrimPrefix(after, ",")); after[0] != ',' || rest == "" {
			return nil, fmt.Errorf("%s is not a selector: a requirement is expected, not %s", quote(text), quote(after))
		}
	}
	return out, nil
}

// parseRequirement parses one requirement and returns the rest of s.
func parseRequirement(s string) (r requirement, rest string, err error) {
	if s, r.not = strings.CutPrefix(s, "!"); r.not {
		s = strings.TrimSpace(s)
	}
	end := strings.IndexAny(s, ",=! \t()")
	if end < 0 {
		end = len(s)
	}
	r.key, rest = s[:end], strings.TrimSpace(s[end:])
	switch {
	case r.key == "":
		return r, "", errors.New("a key is missing")
	case rest == "", rest[0] == ',':
		return r, rest, nil
	case r.not:
		return r, "", fmt.Errorf("%s follows !%s", quote(rest), r.key)
	}
	for _, op := range []struct {
		text string
		not  bool
	}{{"==", false}, {"!=", true}, {"=", false}} {
		if after, ok := strings.CutPrefix(rest, op.text); ok {
			value, after, found := strings.Cut(after, ",")
			if found {
				after = "," + after
			}
			if value = strings.TrimSpace(value); strings.ContainsAny(value, "=!() ") {
				return r, "", fmt.Errorf("%s is not a value", quote(value))
			}
			r.values, r.not = []string{value}, op.not
			return r, after, nil
		}
	}
	op, after, ok := strings.Cut(rest, "(")
	list, after, closed := strings.Cut(after, ")")
	switch op = strings.TrimSpace(op); {
	case !ok || op != "in" && op != "notin":
		return r, "", fmt.Errorf("=, !=, in (...) or notin (...) is expected after %s, not %s", r.key, quote(rest))
	case !closed:
		return r, "", fmt.Errorf("the ) after %s %s is missing", r.key, op)
	}
	for v := range strings.SplitSeq(list, ",") {
		r.values = append(r.values, strings.TrimSpace(v))
	}
	r.not = op == "notin"
	return r, strings.TrimSpace(after), nil
}
