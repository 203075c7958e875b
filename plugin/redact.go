package plugin

import (
	"encoding/base64"
	"encoding/json"
	"net/url"
	"strings"
	"sync"
)

// secrets are the secrets of this process, which texts of registries may
// repeat: an error of a server or proxy often quotes the request.
var secrets struct {
	mu       sync.Mutex
	known    []string // oldest first, guarded by mu as the rest
	replacer *strings.Replacer
}

const (
	// minSecret is the length below which a secret is not looked for: its text
	// would be found in words.
	minSecret = 8
	// maxSecrets bounds the secrets that are remembered, since tokens change.
	maxSecrets = 64
)

// remember makes [redact] find a secret.
func remember(secret string) {
	if len(secret) < minSecret {
		return
	}
	secrets.mu.Lock()
	defer secrets.mu.Unlock()
	for _, s := range secrets.known {
		if s == secret {
			return
		}
	}
	secrets.known = append(secrets.known, secret)
	if len(secrets.known) > maxSecrets {
		secrets.known = secrets.known[1:]
	}
	var pairs []string
	for _, s := range secrets.known {
		quoted, _ := json.Marshal(s) // of text, which has no error
		for _, form := range []string{s, url.QueryEscape(s), url.PathEscape(s), strings.Trim(string(quoted), `"`)} {
			pairs = append(pairs, form, hidden)
		}
	}
	secrets.replacer = strings.NewReplacer(pairs...)
}

// rememberBasic makes [redact] find a password as basic authentication sends
// it.
func rememberBasic(user, password string) {
	if len(password) >= minSecret {
		remember(base64.StdEncoding.EncodeToString([]byte(user + ":" + password)))
	}
}

// redact replaces the secrets in a text. Use it before a text is cut, or a part
// of a secret may stay.
func redact(text string) string {
	secrets.mu.Lock()
	r := secrets.replacer
	secrets.mu.Unlock()
	if r == nil {
		return text
	}
	return r.Replace(text)
}
