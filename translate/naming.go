package translate

import (
	"crypto/sha256"
	"encoding/binary"
	"strings"
)

// Lengths in bytes.
const (
	maxLabel     = 63  // a DNS label, a label value, the name part of a label key
	maxHost      = 255 // a host, as checked by istiod
	maxSubdomain = 253 // RFC 1123 subdomain: names of resources, prefixes of label keys
	cutHash      = 8   // characters of hash that replace the cut part of a name
	instanceHash = 10  // characters of hash (50 bits) that identify an instance in a WorkloadEntry's name

	// maxEntryName reserves room for "-" and the hash of an instance, to keep
	// the WorkloadEntries' names legal.
	maxEntryName = maxSubdomain - 1 - instanceHash
)

// SelectorLabel is the label in the spec of every WorkloadEntry that identifies
// its ServiceEntry in the same namespace; the value is [SelectorValue] of the
// ServiceEntry's name.
const SelectorLabel = "isthmus.io/service"

// SelectorValue returns the value of [SelectorLabel] for the named
// ServiceEntry. Of "namespace/name" only name counts, since a selector is
// limited to its namespace. A legal label value is returned unchanged; others
// are shortened and get a hash.
func SelectorValue(name string) string {
	if _, after, ok := strings.Cut(name, "/"); ok {
		name = after
	}
	if isLabelValue(name) {
		return name
	}
	base := trimName(replaceBytes(name, isLabelByte))
	return withHash(base, shortHash(instanceHash, name), maxLabel)
}

// shortHash returns the first n characters, at most 12, of the lower-case
// base32 of a hash of parts: letters and digits only.
func shortHash(n int, parts ...string) string {
	var buf [256]byte
	b := buf[:0]
	for _, p := range parts {
		b = binary.AppendUvarint(b, uint64(len(p)))
		b = append(b, p...)
	}
	sum := sha256.Sum256(b)
	// With encoding/base32 the array would escape; n is small.
	var text [12]byte
	bits := binary.BigEndian.Uint64(sum[:])
	for i := range n {
		text[i] = "abcdefghijklmnopqrstuvwxyz234567"[bits>>59]
		bits <<= 5
	}
	return string(text[:n])
}

// mend returns s as a name of at most limit bytes allowed by ok that begins and
// ends with a letter or a digit. A legal s is returned unchanged. An illegal
// ASCII character becomes "-". A name with characters beyond ASCII, or one that
// is too long, gets a hash of s to stay distinct. It returns "" if nothing of s
// is left.
func mend(s string, limit int, ok func(byte) bool) string {
	if len(s) <= limit && legal(s, ok) {
		return s
	}
	ascii := true
	for i := range len(s) {
		ascii = ascii && s[i] < 0x80
	}
	base := trimName(replaceBytes(s, ok))
	if ascii && len(base) <= limit {
		return base
	}
	return withHash(base, shortHash(cutHash, s), limit)
}

// withHash returns base, cut to fit, and hash, joined by "-".
func withHash(base, hash string, limit int) string {
	if room := limit - 1 - len(hash); len(base) > room {
		base = trimName(base[:room])
	}
	if base == "" {
		return hash
	}
	return base + "-" + hash
}

// replaceBytes replaces each character that ok does not allow by "-".
func replaceBytes(s string, ok func(byte) bool) string {
	b := make([]byte, 0, len(s))
	for _, r := range s {
		if r < 0x80 && ok(byte(r)) {
			b = append(b, byte(r))
		} else {
			b = append(b, '-')
		}
	}
	return string(b)
}

func legal(s string, ok func(byte) bool) bool {
	if s == "" || !isAlnum(s[0]) || !isAlnum(s[len(s)-1]) {
		return false
	}
	for i := range len(s) {
		if !ok(s[i]) {
			return false
		}
	}
	return true
}

// trimName removes illegal first and last characters of a name.
func trimName(s string) string {
	return strings.TrimFunc(s, func(r rune) bool { return r >= 0x80 || !isAlnum(byte(r)) })
}

func isAlnum(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9'
}

func isDNSByte(c byte) bool {
	return 'a' <= c && c <= 'z' || '0' <= c && c <= '9' || c == '-'
}

func isLabelByte(c byte) bool {
	return isAlnum(c) || c == '-' || c == '_' || c == '.'
}

// lower maps A-Z only: unicode lowers the Kelvin sign to a plain k, which would
// hide a change.
func lower(s string) string {
	for i := range len(s) {
		if 'A' <= s[i] && s[i] <= 'Z' {
			b := []byte(s)
			for ; i < len(b); i++ {
				if 'A' <= b[i] && b[i] <= 'Z' {
					b[i] += 'a' - 'A'
				}
			}
			return string(b)
		}
	}
	return s
}

func isDNSLabel(s string) bool   { return len(s) <= maxLabel && legal(s, isDNSByte) }
func isLabelValue(s string) bool { return len(s) <= maxLabel && legal(s, isLabelByte) }

// isSubdomain reports whether s is an RFC 1123 subdomain: dot-separated labels
// of any length.
func isSubdomain(s string) bool {
	if len(s) > maxSubdomain {
		return false
	}
	for part := range strings.SplitSeq(s, ".") {
		if !legal(part, isDNSByte) {
			return false
		}
	}
	return true
}

func isLabelKey(s string) bool {
	if prefix, name, ok := strings.Cut(s, "/"); ok {
		return isSubdomain(prefix) && isLabelValue(name)
	}
	return isLabelValue(s)
}

// isHost reports whether istiod accepts s as a host.
func isHost(s string) bool {
	if len(s) > maxHost {
		return false
	}
	last := ""
	for part := range strings.SplitSeq(s, ".") {
		if !isDNSLabel(part) {
			return false
		}
		last = part
	}
	return !allDigits(last)
}

func allDigits(s string) bool {
	return strings.Trim(s, "0123456789") == ""
}

// mendHost returns s as a legal host without trailing dot, or "" if nothing of
// a label is left.
func mendHost(s string) string {
	s = strings.TrimSuffix(lower(s), ".")
	if isHost(s) {
		return s
	}
	var labels []string
	for part := range strings.SplitSeq(s, ".") {
		if part == "" {
			continue
		}
		part = mend(part, maxLabel, isDNSByte)
		if part == "" {
			return ""
		}
		labels = append(labels, part)
	}
	if len(labels) == 0 {
		return ""
	}
	if last := len(labels) - 1; allDigits(labels[last]) {
		labels[last] = mend("x"+labels[last], maxLabel, isDNSByte)
	}
	host := strings.Join(labels, ".")
	if len(host) <= maxHost {
		return host
	}
	// Too long: the first label, which identifies the service, gets the hash;
	// of the rest the end, which is the domain, is kept.
	first := withHash(labels[0], shortHash(cutHash, s), maxLabel)
	room := maxHost - len(first)
	from := len(labels)
	for from > 1 && len(labels[from-1])+1 <= room {
		from--
		room -= len(labels[from]) + 1
	}
	return first + "." + strings.Join(labels[from:], ".")
}

// mendSubdomain returns s as an RFC 1123 subdomain of at most limit bytes, or
// "" like mend.
func mendSubdomain(s string, limit int) string {
	s = lower(s)
	if len(s) <= limit && isSubdomain(s) {
		return s
	}
	var labels []string
	for part := range strings.SplitSeq(s, ".") {
		if part == "" {
			continue
		}
		// Labels of a subdomain have no limit of length, but the hash must fit.
		part = mend(part, max(len(part)+1+cutHash, limit), isDNSByte)
		if part == "" {
			return ""
		}
		labels = append(labels, part)
	}
	name := strings.Join(labels, ".")
	if len(name) <= limit {
		return name
	}
	return withHash(name, shortHash(cutHash, s), limit)
}

// mendNamespace returns s as an RFC 1123 label, or "" like mend.
func mendNamespace(s string) string { return mend(lower(s), maxLabel, isDNSByte) }

// mendPortName returns s as a DNS label, or "" like mend.
func mendPortName(s string) string { return mend(lower(s), maxLabel, isDNSByte) }

// mendLabelValue returns s as a label value, or "" like mend.
func mendLabelValue(s string) string { return mend(s, maxLabel, isLabelByte) }

// mendLabelKey returns s as a label key with optional prefix, or "" if nothing
// of the name part is left.
func mendLabelKey(s string) string {
	if isLabelKey(s) {
		return s
	}
	prefix, name, ok := strings.Cut(s, "/")
	if !ok {
		prefix, name = "", s
	}
	name = mend(name, maxLabel, isLabelByte)
	if name == "" {
		return ""
	}
	if prefix = mendSubdomain(prefix, maxSubdomain); prefix == "" {
		return name
	}
	return prefix + "/" + name
}

// entryName returns the default name of a ServiceEntry, without a template: the
// non-empty parts of the key, the most specific first, joined by "-" and made
// legal without a finding.
func entryName(parts ...string) string {
	safe := parts[:0:0]
	for _, p := range parts {
		if p == "" {
			continue
		}
		p = mendSubdomain(p, maxEntryName)
		if p == "" {
			return ""
		}
		safe = append(safe, p)
	}
	return mendSubdomain(strings.Join(safe, "-"), maxEntryName)
}
