package reliability

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strconv"
	"sync"
	"testing"
	"time"
)

// answers is a proxy in front of Consul that replaces its answers.
type answers struct {
	*httputil.ReverseProxy

	mu      sync.Mutex                                   // guards the fields below
	replace func(res *http.Response, body []byte) []byte // nil passes on what Consul says
	ahead   uint64                                       // what Consul's indexes are raised by
	passes  time.Duration                                // how long a query may wait; 0 is any time
}

const (
	indexHeader = "X-Consul-Index"
	goesBack    = 1_000_000
)

func newAnswers(t *testing.T, address string) *answers {
	transport := &http.Transport{MaxIdleConnsPerHost: 64}
	t.Cleanup(transport.CloseIdleConnections)
	a := &answers{ReverseProxy: httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: address}), ahead: 1_000_000 * goesBack}
	direct := a.Director
	a.Director = func(r *http.Request) {
		direct(r)
		a.mu.Lock()
		ahead := a.ahead
		a.mu.Unlock()
		q := r.URL.Query()
		if index, _ := strconv.ParseUint(q.Get("index"), 10, 64); index > ahead {
			q.Set("index", strconv.FormatUint(index-ahead, 10))
			r.URL.RawQuery = q.Encode()
		}
	}
	a.Transport = transport
	// Where Consul is gone there is no answer.
	a.ErrorHandler = func(w http.ResponseWriter, r *http.Request, _ error) {
		if errors.Is(r.Context().Err(), context.DeadlineExceeded) {
			w.WriteHeader(http.StatusGatewayTimeout)
			return
		}
		panic(http.ErrAbortHandler)
	}
	a.ModifyResponse = a.modify
	return a
}

// set replaces all answers from now on, those to queries that wait as well.
func (a *answers) set(replace func(res *http.Response, body []byte) []byte) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.replace = replace
}

// pass lets queries wait for a time at most from now on, as a load balancer
// does; 0 is any time.
func (a *answers) pass(passes time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.passes = passes
}

// ServeHTTP implements http.Handler.
func (a *answers) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	passes := a.passes
	a.mu.Unlock()
	if passes > 0 && r.URL.Query().Has("index") {
		ctx, cancel := context.WithTimeout(r.Context(), passes)
		defer cancel()
		r = r.WithContext(ctx)
	}
	a.ReverseProxy.ServeHTTP(w, r)
}

// back makes the index go back, as it does where a server was replaced by one
// that has made fewer changes. Queries that wait go on, with an index that is
// far ahead.
func (a *answers) back() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.ahead -= goesBack
}

func (a *answers) modify(res *http.Response) error {
	a.mu.Lock()
	replace, ahead := a.replace, a.ahead
	a.mu.Unlock()
	if index, err := strconv.ParseUint(res.Header.Get(indexHeader), 10, 64); err == nil && index > 0 {
		res.Header.Set(indexHeader, strconv.FormatUint(index+ahead, 10))
	}
	if replace == nil {
		return nil
	}
	body, err := io.ReadAll(res.Body)
	res.Body.Close()
	if err != nil {
		return err
	}
	// What is asked for again at once does not occupy the machine.
	timer := time.NewTimer(50 * time.Millisecond)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-res.Request.Context().Done():
	}
	res.Header.Del("Content-Length")
	res.ContentLength = -1
	res.Body = io.NopCloser(bytes.NewReader(replace(res, body)))
	return nil
}

// nothing is an empty list of the kind of body.
func nothing(body []byte) []byte {
	if bytes.HasPrefix(bytes.TrimSpace(body), []byte("{")) {
		return []byte("{}")
	}
	return []byte("[]")
}

func fails(res *http.Response, _ []byte) []byte {
	res.StatusCode, res.Status = http.StatusInternalServerError, ""
	return []byte("rpc error making call: No cluster leader")
}

// isEmpty is what a server answers that was started in the stead of another.
func isEmpty(res *http.Response, body []byte) []byte {
	res.Header.Set(indexHeader, "1")
	return nothing(body)
}

func isFiltered(res *http.Response, body []byte) []byte {
	res.Header.Set("X-Consul-Results-Filtered-By-Acls", "true")
	return nothing(body)
}

// isTruncated breaks off in the middle.
func isTruncated(res *http.Response, body []byte) []byte {
	res.Header.Set("Content-Length", fmt.Sprint(len(body)))
	return body[:len(body)/2]
}

// endsEarly breaks off in the middle, as if it were whole.
func endsEarly(_ *http.Response, body []byte) []byte { return body[:len(body)/2] }

func isSlow(res *http.Response, body []byte) []byte {
	timer := time.NewTimer(time.Second)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-res.Request.Context().Done():
	}
	return body
}
