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
	// token is the current one, from a login or a file.
	token     string
	tokenTime time.Time // of the login, or the modification time of the file
	ttl       time.Duration
}

func newAuth(c Config, client *plugin.HTTPClient, log *slog.Logger) *auth {
	return &auth{config: c, http: client, log: log, login: make(chan struct{}, 1)}
}

// hasUser reports whether the configuration names a user.
func (a *auth) hasUser() bool { return a.config.Username != "" || a.config.UsernameFile != "" }

// headers implements signer.
func (a *auth) headers(_ context.Context, resource string) (map[string]string, error) {
	h := map[string]string{}
	token, err := a.current()
	if err != nil {
		return nil, err
	}
	if token != "" {
		h[headerToken] = token
	}
	a.signTo(h, resource, time.Now())
	return h, nil
}

// signTo adds the cloud's signature for a resource, if a key is configured.
func (a *auth) signTo(h map[string]string, resource string, now time.Time) {
	if a.config.AccessKey == "" {
		return
	}
	h[headerAccessKey] = string(a.config.AccessKey)
	if a.config.SecurityToken != "" {
		h[headerSecurityToken] = string(a.config.SecurityToken)
	}
	key := string(a.config.SecretKey)
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

// current returns the current token, "" for none.
func (a *auth) current() (string, error) {
	if a.config.TokenFile == "" {
		if a.config.Token != "" {
			return string(a.config.Token), nil
		}
		a.mu.Lock()
		defer a.mu.Unlock()
		return a.token, nil
	}
	info, err := os.Stat(a.config.TokenFile)
	if err != nil {
		return "", fmt.Errorf("token_file: %w", err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.token != "" && info.ModTime().Equal(a.tokenTime) {
		return a.token, nil
	}
	token, err := plugin.ReadSecret(a.config.TokenFile)
	if err != nil {
		return "", fmt.Errorf("token_file: %w", err)
	}
	a.token, a.tokenTime = token, info.ModTime()
	return token, nil
}

// ensure logs in if a user is configured and the token is missing or about to
// expire.
func (a *auth) ensure(ctx context.Context, s server) error {
	if !a.hasUser() {
		return nil
	}
	return a.loginUnless(ctx, s, func() bool { return a.token != "" && time.Since(a.tokenTime) < a.life() })
}

// renew replaces a refused token, and reports whether there is a new one.
func (a *auth) renew(ctx context.Context, s server, refused string) bool {
	if !a.hasUser() {
		now, err := a.current()
		return err == nil && now != refused
	}
	err := a.loginUnless(ctx, s, func() bool { return a.token != refused || time.Since(a.tokenTime) < loginApart })
	if err != nil {
		return false
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.token != refused
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
		return "", 0, fmt.Errorf("the answer is no JSON: %w", err)
	case answer.AccessToken == "":
		return "", 0, errors.New("the answer holds no accessToken")
	case answer.TokenTTL < 1 || answer.TokenTTL > 1e9:
		answer.TokenTTL = 60
	}
	return answer.AccessToken, time.Duration(answer.TokenTTL * float64(time.Second)), nil
}
