package kubernetes

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"mime"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin"
)

const (
	// maxPage bounds one page of a listing, in bytes. A larger one is asked for
	// again with fewer objects.
	maxPage = 64 << 20
	// maxEvent bounds one event of a watch. The server's store takes 1.5 MiB
	// for one object, in a denser encoding.
	maxEvent = 16 << 20
	// pageObjects is the number of objects of one page of a listing.
	pageObjects = 500
	// maxStatus bounds how much of an error's answer is read.
	maxStatus = 64 << 10
	// watchAtLeast and watchAtMost are how long a watch is asked for. Between
	// them, so that those of many clients do not end together.
	watchAtLeast = 5 * time.Minute
	watchAtMost  = 10 * time.Minute
	// early is how much before its time a watch may end.
	early = 5 * time.Second
)

// client speaks to one server. It is safe for concurrent use.
type client struct {
	cluster  *cluster
	timeout  time.Duration
	watching func() time.Duration // how long a watch is asked for
	http     *http.Client
}

// connect returns a client. The connection is made with the first request.
func connect(k *cluster, timeout time.Duration) *client {
	dialer := &net.Dialer{Timeout: timeout, KeepAlive: 30 * time.Second}
	return &client{
		cluster: k, timeout: timeout,
		watching: func() time.Duration { return watchAtLeast + rand.N(watchAtMost-watchAtLeast) },
		http: &http.Client{
			// Neither proxies of the environment nor redirects, which would get
			// the token.
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
			Transport: &http.Transport{
				DialContext: dialer.DialContext,
				DialTLSContext: func(ctx context.Context, network, address string) (net.Conn, error) {
					c, err := k.config()
					if err != nil {
						return nil, err
					}
					return (&tls.Dialer{NetDialer: dialer, Config: c}).DialContext(ctx, network, address)
				},
				ForceAttemptHTTP2:     true,
				ResponseHeaderTimeout: timeout,
				// All watches are streams of one connection; a server that is
				// silent on it is asked whether it is there.
				HTTP2: &http.HTTP2Config{SendPingTimeout: timeout / 2, PingTimeout: timeout / 2},
			},
		},
	}
}

// close closes the connections, which must be idle.
func (c *client) close() { c.http.CloseIdleConnections() }

// errExpired reports a revision, or a place in a listing, that the server no
// longer has.
var errExpired = errors.New("the revision to go on from has expired")

// apiError is an answer of the server that is an error.
type apiError struct {
	code    int
	message string
}

// Error implements error.
func (e *apiError) Error() string {
	text := fmt.Sprintf("answers status %d", e.code)
	if e.message != "" {
		text += ": " + plugin.Excerpt(e.message)
	}
	switch e.code {
	case http.StatusUnauthorized:
		text += ": it does not know the user; check the token or the certificate, which may be over"
	case http.StatusForbidden:
		text += ": grant the user list and watch; the adapter's page has the manifest"
	}
	return text
}

// Is makes an answer about an expired revision errExpired.
func (e *apiError) Is(target error) bool { return target == errExpired && e.code == http.StatusGone }

// get begins a request. The caller closes the body.
func (c *client) get(ctx context.Context, path string, query url.Values) (*http.Response, error) {
	u := c.cluster.server.JoinPath(path)
	u.RawQuery = query.Encode()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, err
	}
	token, err := c.cluster.bearer()
	if err != nil {
		return nil, err
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	req.Header.Set("Accept", "application/json")
	req.Header.Set("User-Agent", "isthmus")
	res, err := c.http.Do(req)
	if err != nil {
		if u, ok := errors.AsType[*url.Error](err); ok {
			err = u.Err // the address is in the registry's detail
		}
		return nil, err
	}
	if res.StatusCode != http.StatusOK {
		defer res.Body.Close()
		body, _ := io.ReadAll(io.LimitReader(res.Body, maxStatus)) // best effort
		var s status
		if json.Unmarshal(body, &s) != nil || s.Kind != "Status" {
			s.Message = string(body)
		}
		return nil, &apiError{res.StatusCode, s.Message}
	}
	if kind, _, _ := mime.ParseMediaType(res.Header.Get("Content-Type")); kind != "application/json" {
		defer res.Body.Close()
		body, _ := io.ReadAll(io.LimitReader(res.Body, maxStatus)) // best effort
		return nil, fmt.Errorf("answers %q in place of JSON: %q; is it an API server?", kind, plugin.Excerpt(string(body)))
	}
	return res, nil
}

// status is the part of a Status that matters.
type status struct {
	Kind    string `json:"kind"`
	Message string `json:"message"`
	Code    int    `json:"code"`
}

// read reads one JSON value.
func (c *client) read(ctx context.Context, path string, query url.Values, value any) error {
	ctx, cancel := context.WithTimeoutCause(ctx, c.timeout, fmt.Errorf("no whole answer within %v; if it is a large one, raise timeout", c.timeout))
	defer cancel()
	err := func() error {
		res, err := c.get(ctx, path, query)
		if err != nil {
			return err
		}
		defer res.Body.Close()
		b, err := io.ReadAll(http.MaxBytesReader(nil, res.Body, maxPage))
		if err != nil {
			return err
		}
		if err := json.Unmarshal(b, value); err != nil {
			return fmt.Errorf("the answer to %s is no JSON of the expected form: %w", path, err)
		}
		return nil
	}()
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// source is one resource that is listed and watched.
type source struct {
	path string // of the API, with the namespace
	// labels is a selector, or "".
	labels string
	// kind is what the objects are, for state.put: Service, EndpointSlice, or a
	// collection.
	kind string
}

// page is a page of a listing.
type page struct {
	Kind     string `json:"kind"`
	Metadata struct {
		Revision string `json:"resourceVersion"`
		Continue string `json:"continue"`
	} `json:"metadata"`
	Items []json.RawMessage `json:"items"`
}

// list passes all objects of a source to put, and returns their revision.
func (c *client) list(ctx context.Context, s source, put func(json.RawMessage)) (revision string, err error) {
	limit, next := pageObjects, ""
	for {
		query := url.Values{"limit": {strconv.Itoa(limit)}}
		if s.labels != "" {
			query.Set("labelSelector", s.labels)
		}
		if next != "" {
			query.Set("continue", next)
		}
		var p page
		err := c.read(ctx, s.path, query, &p)
		if _, tooLarge := errors.AsType[*http.MaxBytesError](err); tooLarge && limit > 1 {
			limit /= 2
			continue
		}
		switch {
		case err != nil:
			return "", err
		case !strings.HasSuffix(p.Kind, "List") || p.Metadata.Revision == "":
			return "", fmt.Errorf("the answer to %s is no list with a revision, but of kind %q", s.path, plugin.Excerpt(p.Kind))
		case p.Metadata.Continue != "" && p.Metadata.Continue == next:
			return "", fmt.Errorf("the server lists %s in a circle", s.path)
		}
		revision, next = p.Metadata.Revision, p.Metadata.Continue
		for _, item := range p.Items {
			put(item)
		}
		if next == "" {
			return revision, nil
		}
	}
}

// bookmark is the type of an event that has a revision only.
const bookmark = "BOOKMARK"

// event is an event of a watch.
type event struct {
	Type   string          `json:"type"`
	Object json.RawMessage `json:"object"`

	source   source
	revision string
}

// watch passes the events of a source behind a revision to take, until it
// fails or ctx ends. It calls opened when the server has accepted it.
func (c *client) watch(ctx context.Context, s source, revision string, opened func(), take func(event)) error {
	for {
		lasts := c.watching()
		begin := time.Now()
		last, err := c.watchOnce(ctx, s, revision, lasts, opened, take)
		if err != nil {
			return err
		}
		if time.Since(begin) < lasts-early {
			return fmt.Errorf("the server ended the watch of %s after %v", s.path, time.Since(begin).Round(time.Second))
		}
		revision = last
		// It was answered, which counts as progress.
		take(event{Type: bookmark, source: s, revision: revision})
	}
}

// watchOnce is one request of a watch. It returns the last revision when the
// server ends it in good order.
func (c *client) watchOnce(ctx context.Context, s source, revision string, lasts time.Duration, opened func(), take func(event)) (string, error) {
	// A server that forgets to end it is not waited for.
	ctx, cancel := context.WithTimeoutCause(ctx, lasts+c.timeout, fmt.Errorf("the watch of %s did not end in its time", s.path))
	defer cancel()
	query := url.Values{
		"watch": {"true"}, "allowWatchBookmarks": {"true"}, "resourceVersion": {revision},
		"timeoutSeconds": {strconv.Itoa(max(1, int(lasts.Seconds())))},
	}
	if s.labels != "" {
		query.Set("labelSelector", s.labels)
	}
	fail := func(err error) (string, error) {
		if ctx.Err() != nil {
			return "", context.Cause(ctx)
		}
		return "", err
	}
	res, err := c.get(ctx, s.path, query)
	if err != nil {
		return fail(err)
	}
	defer res.Body.Close()
	opened()
	lines := bufio.NewScanner(res.Body)
	lines.Buffer(nil, maxEvent)
	for lines.Scan() {
		line := bytes.TrimSpace(lines.Bytes())
		if len(line) == 0 {
			continue
		}
		e := event{source: s}
		if err := json.Unmarshal(line, &e); err != nil {
			return fail(fmt.Errorf("the watch of %s: an event is no JSON of the expected form: %w", s.path, err))
		}
		next, err := e.check(revision)
		if err != nil {
			return fail(fmt.Errorf("the watch of %s: %w", s.path, err))
		}
		revision, e.revision = next, next
		take(e)
	}
	if err := lines.Err(); err != nil {
		return fail(fmt.Errorf("the watch of %s: %w", s.path, err))
	}
	return revision, nil
}

// check returns the revision after an event, or the error that it is.
func (e *event) check(was string) (revision string, err error) {
	switch e.Type {
	case "ADDED", "MODIFIED", "DELETED", bookmark:
	case "ERROR":
		var s status
		if err := json.Unmarshal(e.Object, &s); err != nil {
			return "", fmt.Errorf("the server reports an error: %q", plugin.Excerpt(string(e.Object)))
		}
		return "", &apiError{s.Code, s.Message}
	default:
		return "", fmt.Errorf("the server sends an event of type %q", plugin.Excerpt(e.Type))
	}
	var o struct {
		Metadata struct {
			Revision string `json:"resourceVersion"`
		} `json:"metadata"`
	}
	if err := json.Unmarshal(e.Object, &o); err != nil {
		return "", fmt.Errorf("an event is no JSON of the expected form: %w", err)
	}
	if goesBack(was, o.Metadata.Revision) {
		return "", fmt.Errorf("the server's revision went back from %s to %s: it has lost data, was restored from a backup, or another one has taken its place", was, o.Metadata.Revision)
	}
	return cmp.Or(o.Metadata.Revision, was), nil
}

// goesBack reports whether a revision is before another one. They are numbers
// for every server that is conformant from 1.35 on, and were before; of others
// nothing is said.
func goesBack(was, is string) bool {
	a, errA := strconv.ParseUint(was, 10, 64)
	b, errB := strconv.ParseUint(is, 10, 64)
	return errA == nil && errB == nil && b < a
}

func decodeBase64(text string) ([]byte, error) {
	return base64.StdEncoding.DecodeString(strings.Join(strings.Fields(text), ""))
}
