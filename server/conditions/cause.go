package conditions

import "regexp"

// Cause is why a registry cannot be followed, as far as its error tells.
type Cause struct {
	// Check names it for programs: "registry-token".
	Check string
	// Field is the field of the registry's block that decides, or "".
	Field string
	// Change says what to change, or is "".
	Change string
}

var causes = []struct {
	words *regexp.Regexp
	Cause
}{
	{regexp.MustCompile(`(?i)x509|certificate|tls:|TLS handshake|http: server gave HTTP response`), Cause{"registry-tls", "config.tls", "config.tls: {ca_file: FILE, server_name: NAME}, or the scheme of the address"}},
	{regexp.MustCompile(`(?i)\b40[13]\b|permission denied|unauthori[sz]ed|forbidden|token|\bACL\b|authenticat`), Cause{"registry-token", "config.token_file", "config.token_file, or what the token, user or password may read"}},
	{regexp.MustCompile(`(?i)refused|no such host|timeout|unreachable|no route|deadline|dial |EOF|reset`), Cause{"registry-reach", "config.address", "config.address, or the network and firewalls between here and it"}},
}

// CauseOf classifies the error of a registry.
func CauseOf(why string) Cause {
	for _, c := range causes {
		if c.words.MatchString(why) {
			return c.Cause
		}
	}
	return Cause{Check: "registry-down"}
}
