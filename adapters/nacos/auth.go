package nacos

import (
	"context"
	"crypto/hmac"
	"crypto/sha1" // what the cloud's scheme uses
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin"
)

const (
	// refreshAt is the fraction of a token's life after which it is renewed.
	refreshAt = 0.6
	// loginRetry is the pause after a failed login.
	loginRetry = 2 * time.Second
	// loginApart is the shortest time between two logins, even if tokens are
	// refused.
	loginApart = time.Second
)

// Names of credentials in the metadata of a gRPC payload.
const (
	headerToken         = "accessToken"
	headerAccessKey     = "ak"
	headerData          = "data"
	headerSignature     = "signature"
	headerVersion       = "signatureVersion"
	headerSecurityToken = "Spas-SecurityToken"
)

// errLogin is an answer to a login that holds no token.
type errLogin struct{ reason string }

// Error implements error.
func (e *errLogin) Error() string { return "login refused: " + e.reason }

// auth authenticates requests. Its zero value sends no credentials.
type auth struct {
	config Config
	http   *plugin.HTTPClient
	log    *slog.Logger

	login chan struct{} // a semaphore of one, held during a login

	mu sync.Mutex // guards everything below
	// token is that of the last login, which was at tokenTime.
	token     string
	tokenTime time.Time
	ttl       time.Duration
	files     map[string]secretFile // by path
	// version counts the changes of token and files.
	version uint64
}

// secretFile is a file as it was last read.
type secretFile struct {
	value    string
	modified time.Time // zero to read it again
}

func newAuth(c Config, client *plugin.HTTPClient, log *slog.Logger) *auth {
	return &auth{config: c, http: client, log: log, login: make(chan struct{}, 1), files: map[string]secretFile{}}
}

// hasUser reports whether the configuration names a user.
func (a *auth) hasUser() bool { return a.config.Username != "" || a.config.UsernameFile != "" }

// headers implements signer.
func (a *auth) headers(resource string) (h map[string]string, used uint64, err error) {
	h = map[string]string{}
	used, err = a.tokenTo(h)
	if err == nil {
		err = a.signTo(h, resource, time.Now())
	}
	return h, used, err
}

// tokenTo adds the token, and returns the version of the credentials, or one
// before.
func (a *auth) tokenTo(h map[string]string) (version uint64, err error) {
	a.mu.Lock()
	version, token := a.version, a.token
	a.mu.Unlock()
	if !a.hasUser() {
		token, err = a.secret("token_file", a.config.Token, a.config.TokenFile)
	}
	if token != "" {
		h[headerToken] = token
	}
	return version, err
}

// signTo adds the cloud's signature for a resource, if a key is configured.
func (a *auth) signTo(h map[string]string, resource string, now time.Time) error {
	accessKey, err := a.secret("access_key_file", a.config.AccessKey, a.config.AccessKeyFile)
	if err != nil || accessKey == "" {
		return err
	}
	key, err := a.secret("secret_key_file", a.config.SecretKey, a.config.SecretKeyFile)
	if err != nil {
		return err
	}
	securityToken, err := a.secret("security_token_file", a.config.SecurityToken, a.config.SecurityTokenFile)
	if err != nil {
		return err
	}
	h[headerAccessKey] = accessKey
	if securityToken != "" {
		h[headerSecurityToken] = securityToken
	}
	if a.config.Region != "" {
		h[headerVersion] = "v4"
		key = signingKey(key, now.UTC().Format("20060102"), a.config.Region)
	}
	data := strconv.FormatInt(now.UnixMilli(), 10)
	if resource != "" {
		data += serviceKeySeparator + resource
	}
	mac := hmac.New(sha1.New, []byte(key))
	mac.Write([]byte(data))
	h[headerData] = data
	h[headerSignature] = base64.StdEncoding.EncodeToString(mac.Sum(nil))
	return nil
}

// signingKey derives the key of the scheme's version 4.
func signingKey(secret, date, region string) string {
	key := []byte("aliyun_v4" + secret)
	for _, part := range []string{date, region, "mse", "aliyun_v4_request"} {
		mac := hmac.New(sha256.New, key)
		mac.Write([]byte(part))
		key = mac.Sum(nil)
	}
	return base64.StdEncoding.EncodeToString(key)
}

// secret returns a credential: the value, or the content of the file, which is
// read again once it was modified.
func (a *auth) secret(field string, value plugin.Secret, file string) (string, error) {
	if file == "" {
		return string(value), nil
	}
	info, err := os.Stat(file)
	if err != nil {
		return "", fmt.Errorf("%s: %w", field, err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	f := a.files[file]
	if info.ModTime().Equal(f.modified) {
		return f.value, nil
	}
	read, err := plugin.ReadSecret(file)
	if err != nil {
		return "", fmt.Errorf("%s: %w", field, err)
	}
	if read != f.value {
		a.version++
	}
	a.files[file] = secretFile{read, info.ModTime()}
	return read, nil
}

// ensure logs in if a user is configured and the token is missing or about to
// expire.
func (a *auth) ensure(ctx context.Context, s server) error {
	if !a.hasUser() {
		return nil
	}
	return a.loginUnless(ctx, s, func() bool { return a.token != "" && time.Since(a.tokenTime) < a.life() })
}

// renew replaces refused credentials, those of a version, and reports whether
// there are others: files are read again, and a user is logged in again.
func (a *auth) renew(ctx context.Context, s server, refused uint64) bool {
	a.mu.Lock()
	for file, f := range a.files {
		a.files[file] = secretFile{value: f.value}
	}
	a.mu.Unlock()
	if _, _, err := a.headers(""); err != nil {
		return false
	}
	if a.hasUser() && a.loginUnless(ctx, s, func() bool { return a.version != refused || time.Since(a.tokenTime) < loginApart }) != nil {
		return false
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.version != refused
}

// life is how long the current token is used.
func (a *auth) life() time.Duration { return time.Duration(float64(a.ttl) * refreshAt) }

// loginUnless logs in unless the condition, called under mu, holds. One login
// runs at a time.
func (a *auth) loginUnless(ctx context.Context, s server, unless func() bool) error {
	select {
	case a.login <- struct{}{}:
		defer func() { <-a.login }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	a.mu.Lock()
	good := unless()
	a.mu.Unlock()
	if good {
		return nil
	}
	token, ttl, err := a.doLogin(ctx, s)
	if err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.token, a.ttl, a.tokenTime = token, ttl, time.Now()
	a.version++
	return nil
}

// keepFresh renews the token in time until ctx ends. It reports failures, and
// nil when one is over.
func (a *auth) keepFresh(ctx context.Context, s server, report func(error)) {
	if !a.hasUser() {
		return
	}
	failed := false
	for {
		a.mu.Lock()
		wait := time.Until(a.tokenTime.Add(a.life()))
		a.mu.Unlock()
		if failed {
			wait = loginRetry
		}
		if !plugin.Pause(ctx, max(wait, 100*time.Millisecond), nil) {
			return
		}
		err := a.ensure(ctx, s)
		if ctx.Err() != nil {
			return
		}
		if err != nil || failed {
			report(err)
		}
		failed = err != nil
	}
}

// loginPaths are the login endpoints: of 3.x, and of earlier versions, which
// 3.x may have disabled.
var loginPaths = []string{"/v3/auth/user/login", "/v1/auth/users/login"}

// doLogin logs in to a server.
func (a *auth) doLogin(ctx context.Context, s server) (token string, ttl time.Duration, err error) {
	username, password := a.config.Username, string(a.config.Password)
	if a.config.UsernameFile != "" {
		if username, err = plugin.ReadSecret(a.config.UsernameFile); err != nil {
			return "", 0, fmt.Errorf("username_file: %w", err)
		}
	}
	if a.config.PasswordFile != "" {
		if password, err = plugin.ReadSecret(a.config.PasswordFile); err != nil {
			return "", 0, fmt.Errorf("password_file: %w", err)
		}
	}
	form := url.Values{"username": {username}, "password": {password}}.Encode()
	for _, path := range loginPaths {
		var body []byte
		var status int
		body, status, err = httpDo(ctx, a.http, http.MethodPost, s.url(path), form, nil)
		if err != nil && strings.Contains(err.Error(), "malformed HTTP") {
			// 2.1.1 sends status 0 here. Package net/http has no distinct error
			// for it.
			return "", 0, &errLogin{reason: fmt.Sprintf("user %q: the answer is no HTTP, as it is of some servers 2.x for a wrong user name or password (%v)", username, err)}
		}
		if err != nil {
			return "", 0, fmt.Errorf("login: %w", err)
		}
		if status == http.StatusNotFound || status == http.StatusGone || status == http.StatusNotImplemented || status == http.StatusMethodNotAllowed {
			err = &errLogin{reason: fmt.Sprintf("%s answers %d; is the context path right?", s.url(path), status)}
			continue
		}
		token, ttl, err = parseLogin(status, body)
		if err != nil {
			return "", 0, &errLogin{reason: fmt.Sprintf("user %q: %v", username, err)}
		}
		return token, ttl, nil
	}
	return "", 0, err
}

// parseLogin decodes the answer to a login.
func parseLogin(status int, body []byte) (token string, ttl time.Duration, err error) {
	var answer struct {
		AccessToken string  `json:"accessToken"`
		TokenTTL    float64 `json:"tokenTtl"` // seconds
	}
	err = json.Unmarshal(body, &answer)
	switch {
	case status != http.StatusOK:
		return "", 0, fmt.Errorf("status %d %q", status, plugin.Excerpt(saying(body)))
	case err != nil:
		return "", 0, fmt.Errorf("the answer is not JSON: %w", err)
	case answer.AccessToken == "":
		return "", 0, errors.New("the answer holds no accessToken")
	case answer.TokenTTL < 1 || answer.TokenTTL > 1e9:
		answer.TokenTTL = 60
	}
	return answer.AccessToken, time.Duration(answer.TokenTTL * float64(time.Second)), nil
}
