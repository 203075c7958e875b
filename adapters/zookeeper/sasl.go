package zookeeper

import (
	"crypto/md5" //nolint:gosec // the mechanism is made of it (RFC 2831)
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
)

// errChallenge reports a challenge of SASL that is none of DIGEST-MD5.
var errChallenge = errors.New("the server's challenge is none of SASL DIGEST-MD5, the only mechanism that the adapter has")

// digestMD5 answers a challenge of SASL DIGEST-MD5 (RFC 2831, section 2.1.2) as
// ZooKeeper's own clients do, for the service zookeeper of the realm
// zk-sasl-md5.
func digestMD5(challenge []byte, user, password, nonce string) ([]byte, error) {
	fields := directives(string(challenge))
	if fields["nonce"] == "" || fields["algorithm"] != "md5-sess" {
		return nil, errChallenge
	}
	realm := fields["realm"]
	for _, text := range []string{user, password, realm, fields["nonce"]} {
		if strings.ContainsAny(text, "\"\\") {
			return nil, errors.New("a quote or a backslash has no place in user, password or the server's realm with SASL DIGEST-MD5")
		}
	}
	const uri, count = "zookeeper/zk-sasl-md5", "00000001"
	sum := func(text string) string {
		s := md5.Sum([]byte(text)) //nolint:gosec // as above
		return string(s[:])
	}
	hexed := func(text string) string { return hex.EncodeToString([]byte(sum(text))) }
	a1 := sum(user+":"+realm+":"+password) + ":" + fields["nonce"] + ":" + nonce
	a2 := "AUTHENTICATE:" + uri
	response := hexed(strings.Join([]string{hexed(a1), fields["nonce"], count, nonce, "auth", hexed(a2)}, ":"))
	return fmt.Appendf(nil, `charset=utf-8,username="%s",realm="%s",nonce="%s",nc=%s,cnonce="%s",digest-uri="%s",maxbuf=65536,response=%s,qop=auth`,
		user, realm, fields["nonce"], count, nonce, uri, response), nil
}

// directives parses key=value and key="value", separated by commas.
func directives(text string) map[string]string {
	out := map[string]string{}
	for text != "" {
		key, rest, ok := strings.Cut(text, "=")
		if !ok {
			break
		}
		var value string
		if quoted, is := strings.CutPrefix(rest, `"`); is {
			value, rest, _ = strings.Cut(quoted, `"`)
			_, text, _ = strings.Cut(rest, ",")
		} else {
			value, text, _ = strings.Cut(rest, ",")
		}
		out[strings.TrimSpace(key)] = value
	}
	return out
}

// newNonce returns a text that nobody can guess.
func newNonce() string { return rand.Text() }
