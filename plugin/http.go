package plugin

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/clip"
)

// HTTP is the configuration of an HTTP client. Embed it into an adapter's
// Config to make its fields part of that.
//
//	type Config struct {
//		Servers []string `json:"servers,omitempty"`
//		plugin.HTTP
//	}
type HTTP struct {
	Username     string   `json:"username,omitempty" jsonschema_description:"User of basic authentication."`
	Password     Secret   `json:"password,omitempty" jsonschema_description:"The user's password, usually as ${NAME} from the environment."`
	UsernameFile string   `json:"username_file,omitempty" jsonschema_description:"File that holds the user's name, read again for every request."`
	PasswordFile string   `json:"password_file,omitempty" jsonschema_description:"File that holds the password, read again for every request."`
	Token        Secret   `json:"token,omitempty" jsonschema_description:"Token that is sent as Authorization: Bearer, in place of a user."`
	TokenFile    string   `json:"token_file,omitempty" jsonschema_description:"File that holds the token, read again for every request."`
	TLS          TLS      `json:"tls,omitempty" jsonschema_description:"TLS towards the servers, for those that are written with https://."`
	Timeout      Duration `json:"timeout,omitempty" jsonschema_description:"How long one request may take, 1s to 10m. Default: 30s."`
}

const (
	defaultHTTPTimeout = 30 * time.Second
	// maxSecretBytes bounds the size of a file with one secret.
	maxSecretBytes = 64 << 10
	// maxErrorBody bounds how much of an error response is read.
	maxErrorBody = 64 << 10
	// maxConns bounds the connections to one server.
	maxConns = 32
	// maxExcerpt bounds how much of an answer is shown, in bytes.
	maxExcerpt = 300
)

// Check validates the fields and returns each error as a *[FieldError]. It
// reads no file.
func (h HTTP) Check() (errs []error) {
	bad := func(field, reason string) { errs = append(errs, &FieldError{Field: field, Reason: reason}) }
	user := h.Username != "" || h.UsernameFile != ""
	password := h.Password != "" || h.PasswordFile != ""
	token := h.Token != "" || h.TokenFile != ""
	if h.Username != "" && h.UsernameFile != "" {
		bad("username_file", "username is set too; keep one of them")
	}
	if h.Password != "" && h.PasswordFile != "" {
		bad("password_file", "password is set too; keep one of them")
	}
	if h.Token != "" && h.TokenFile != "" {
		bad("token_file", "token is set too; keep one of them")
	}
	if password && !user {
		bad("username", "is missing; the password needs it")
	}
	if token && (user || password) {
		bad("token", "a user is set too; keep one of them")
	}
	errs = append(errs, h.Timeout.Check("timeout", time.Second, 10*time.Minute)...)
	return append(errs, h.TLS.Check("tls")...)
}

// CheckServers validates the server URLs of the given field, at least one, and
// returns each error as a *[FieldError].
func CheckServers(field string, servers []string) (errs []error) {
	if len(servers) == 0 {
		return []error{&FieldError{Field: field, Reason: "is empty; name at least one server, as http://host:port"}}
	}
	seen := map[string]bool{}
	for i, s := range servers {
		at := fmt.Sprintf("%s[%d]", field, i)
		u, err := url.Parse(s)
		switch {
		case err != nil || u.Host == "" || u.Hostname() == "" || u.Scheme != "http" && u.Scheme != "https":
			errs = append(errs, &FieldError{Field: at, Reason: "is not a URL; write http://host:port/path or https://host:port/path"})
		case u.User != nil:
			errs = append(errs, &FieldError{Field: at, Reason: "a user has no place in a URL; use username and password_file"})
		case u.RawQuery != "" || u.Fragment != "":
			errs = append(errs, &FieldError{Field: at, Reason: "query and fragment have no place here"})
		case seen[s]:
			errs = append(errs, &FieldError{Field: at, Reason: fmt.Sprintf("%q is listed twice", s)})
		}
		seen[s] = true
	}
	return errs
}

// HTTPClient makes requests as configured by [HTTP]. It ignores the
// environment, proxies included, and follows no redirects, which would leak the
// credentials. It is safe for concurrent use.
type HTTPClient struct {
	config  HTTP
	maxBody int64
	timeout time.Duration
	client  *http.Client
}

// NewClient returns a client that accepts response bodies of at most maxBody
// bytes, uncompressed. It reads the configured files; an error is a
// *[FieldError].
func (h HTTP) NewClient(maxBody int64) (*HTTPClient, error) {
	if _, err := h.TLS.Config("tls"); err != nil {
		return nil, err
	}
	if _, err := h.credentials(); err != nil {
		return nil, err
	}
	dialer := &net.Dialer{Timeout: 10 * time.Second, KeepAlive: 30 * time.Second}
	transport := &http.Transport{
		DialContext:         dialer.DialContext,
		DialTLSContext:      h.TLS.DialHTTP("tls", dialer),
		ForceAttemptHTTP2:   true,
		MaxConnsPerHost:     maxConns,
		MaxIdleConnsPerHost: maxConns,
		IdleConnTimeout:     90 * time.Second,
	}
	return &HTTPClient{
		config: h, maxBody: maxBody, timeout: cmp.Or(time.Duration(h.Timeout), defaultHTTPTimeout),
		client: &http.Client{
			Transport:     transport,
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
	}, nil
}

// Close closes the connections, which must be idle.
func (c *HTTPClient) Close() { c.client.CloseIdleConnections() }

// StatusError is a response with a status other than 200 to 299.
type StatusError struct {
	Status int
	// Body is its body, or the first 64 KiB of it.
	Body []byte
}

// Error implements error.
func (e *StatusError) Error() string {
	text := fmt.Sprintf("answers status %d", e.Status)
	switch e.Status {
	case http.StatusUnauthorized:
		text += ": it wants a user or token, or another one; see username, password_file and token_file"
	case http.StatusForbidden:
		text += ": the credentials do not permit reading it"
	}
	if body := Excerpt(string(e.Body)); body != "" {
		text += fmt.Sprintf(" %q", body)
	}
	return text
}

// Do sends a request with the credentials and calls read with a response of
// status 200 to 299. Its body fails beyond the client's limit. Any other status
// is a *[StatusError]. read must not retain the response.
func (c *HTTPClient) Do(req *http.Request, read func(*http.Response) error) error {
	ctx, cancel := context.WithTimeoutCause(req.Context(), c.timeout, fmt.Errorf("no whole answer within %v; if it is a large one, raise timeout", c.timeout))
	defer cancel()
	header, err := c.config.credentials()
	if err != nil {
		return err
	}
	req = req.Clone(ctx)
	if header != "" {
		req.Header.Set("Authorization", header)
	}
	if req.Header.Get("User-Agent") == "" {
		req.Header.Set("User-Agent", "isthmus")
	}
	err = c.do(req, read)
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

func (c *HTTPClient) do(req *http.Request, read func(*http.Response) error) error {
	res, err := c.client.Do(req)
	if err != nil {
		if u, ok := errors.AsType[*url.Error](err); ok {
			err = u.Err // the caller adds the address
		}
		return err
	}
	defer res.Body.Close()
	if res.StatusCode < 200 || res.StatusCode > 299 {
		body, _ := io.ReadAll(io.LimitReader(res.Body, maxErrorBody)) // best effort
		return &StatusError{Status: res.StatusCode, Body: body}
	}
	res.Body = http.MaxBytesReader(nil, res.Body, c.maxBody)
	err = read(res)
	if _, tooLong := errors.AsType[*http.MaxBytesError](err); tooLong {
		return fmt.Errorf("the answer is longer than %d MiB", c.maxBody>>20)
	}
	return err
}

// Excerpt returns the beginning of what a server says, on one line and without
// the secrets of this process, for an error or a log.
func Excerpt(text string) string {
	return clip.Text(redact(strings.Join(strings.Fields(text), " ")), maxExcerpt)
}

// GetJSON requests a URL and decodes the response, one JSON value, into v.
func (c *HTTPClient) GetJSON(ctx context.Context, target string, v any) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, target, nil)
	if err != nil {
		return err
	}
	req.Header.Set("Accept", "application/json")
	return c.Do(req, func(res *http.Response) error {
		d := json.NewDecoder(res.Body)
		if err := d.Decode(v); err != nil {
			return fmt.Errorf("the answer is not JSON of the expected form: %w", err)
		}
		if _, err := d.Token(); !errors.Is(err, io.EOF) {
			return errors.New("the answer goes on after its JSON value")
		}
		return nil
	})
}

// credentials returns the value of the Authorization header, or "".
func (h HTTP) credentials() (string, error) {
	secret := func(field, value, file string) (string, error) {
		if file == "" {
			return value, nil
		}
		s, err := ReadSecret(file)
		if err != nil {
			return "", &FieldError{Field: field, Reason: err.Error()}
		}
		return s, nil
	}
	token, err := secret("token_file", string(h.Token), h.TokenFile)
	if err != nil {
		return "", err
	}
	if token != "" {
		return "Bearer " + token, nil
	}
	user, err := secret("username_file", h.Username, h.UsernameFile)
	if err != nil || user == "" {
		return "", err
	}
	password, err := secret("password_file", string(h.Password), h.PasswordFile)
	if err != nil {
		return "", err
	}
	rememberBasic(user, password)
	r := http.Request{Header: http.Header{}}
	r.SetBasicAuth(user, password)
	return r.Header.Get("Authorization"), nil
}

// ReadSecret returns the content of a file with one secret, without surrounding
// space. An empty file is an error.
func ReadSecret(file string) (string, error) {
	f, err := os.Open(file)
	if err != nil {
		return "", err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxSecretBytes+1))
	switch {
	case err != nil:
		return "", err
	case len(b) > maxSecretBytes:
		return "", fmt.Errorf("%s is longer than %d KiB, which is too long for a secret", file, maxSecretBytes>>10)
	}
	b = bytes.TrimSpace(b)
	if len(b) == 0 {
		return "", fmt.Errorf("%s is empty", file)
	}
	remember(string(b))
	return string(b), nil
}
