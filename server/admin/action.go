package admin

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"time"

	"github.com/isthmus-mesh/isthmus/server/access"
)

// maxBody bounds the body of a request: a configuration file as JSON.
const maxBody = 16 << 20

// sameOrigin refuses what a web page of another origin has a browser send: any
// request that changes something, and any other but to show a page. A browser
// says where a request is from in Sec-Fetch-Site, or else in Origin; other
// programs send neither.
func sameOrigin(next http.Handler) http.Handler {
	origin := http.NewCrossOriginProtection()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		err := origin.Check(r)
		if site := r.Header.Get("Sec-Fetch-Site"); err == nil && site != "" && site != "same-origin" && site != "none" && r.Header.Get("Sec-Fetch-Mode") != "navigate" {
			err = errors.New("cross-origin request detected from Sec-Fetch-Site header")
		}
		if err != nil {
			writeError(w, http.StatusForbidden, err.Error()+": a web page of another origin may not do this")
			return
		}
		next.ServeHTTP(w, r)
	})
}

// action is a request that changes something: it must be a POST with JSON,
// which a browser does not send for a page of another origin without asking.
func action(next http.HandlerFunc) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodPost {
			w.Header().Set("Allow", http.MethodPost)
			writeError(w, http.StatusMethodNotAllowed, "this call changes something: use POST")
			return
		}
		if !operates(w, r) {
			return
		}
		if kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || kind != "application/json" {
			writeError(w, http.StatusUnsupportedMediaType, "send the header Content-Type: application/json; nothing was done")
			return
		}
		r.Body = http.MaxBytesReader(w, r.Body, maxBody)
		next(w, r)
	})
}

// operates reports whether the caller may do more than read; otherwise it has
// sent the response. Without a gate everyone may.
func operates(w http.ResponseWriter, r *http.Request) bool {
	role, ok := access.RoleOf(r.Context())
	if !ok || role == access.Operate {
		return true
	}
	writeError(w, http.StatusForbidden, "this call needs role: operate, which a rule in listen.admin.allow gives, and so does a unix socket as listen.admin")
	return false
}

// body decodes the body of a request, which may be empty. On failure it has
// sent the response.
func body(w http.ResponseWriter, r *http.Request, v any) bool {
	dec := json.NewDecoder(r.Body)
	dec.DisallowUnknownFields()
	err := dec.Decode(v)
	if err == nil {
		if _, more := dec.Token(); more != io.EOF { //nolint:errorlint // Token returns it as it is
			err = errors.New("more than one JSON value")
		}
	}
	if err != nil && !errors.Is(err, io.EOF) {
		code := http.StatusBadRequest
		if _, large := errors.AsType[*http.MaxBytesError](err); large {
			code = http.StatusRequestEntityTooLarge
		}
		writeError(w, code, fmt.Sprintf("the body: %v", err))
		return false
	}
	return true
}

// writeReloaded responds with the changes of a configuration, or with 422 and
// its errors.
func writeReloaded(w http.ResponseWriter, r Reloaded) {
	code := http.StatusOK
	if len(r.Problems) > 0 {
		code = http.StatusUnprocessableEntity
	}
	writeJSON(w, code, r)
}

func reload(w http.ResponseWriter, r *http.Request, o Operator) {
	if !body(w, r, new(struct{})) {
		return
	}
	result, err := o.Reload(r.Context(), "API")
	if err != nil {
		writeError(w, http.StatusServiceUnavailable, err.Error())
		return
	}
	access.Note(r.Context(), "sha256="+result.Hash)
	writeReloaded(w, result)
}

func compare(w http.ResponseWriter, r *http.Request, o Operator) {
	var request struct {
		Config string `json:"config"` // the text of a configuration file
	}
	if body(w, r, &request) {
		writeReloaded(w, o.Compare([]byte(request.Config)))
	}
}

// logLevel changes the log level.
func logLevel(w http.ResponseWriter, r *http.Request, o Operator) {
	var request struct {
		Level string `json:"level"`
	}
	if !body(w, r, &request) {
		return
	}
	access.Note(r.Context(), "level="+request.Level)
	was, err := o.SetLogLevel(request.Level)
	if err != nil {
		writeError(w, http.StatusBadRequest, err.Error())
		return
	}
	writeJSON(w, http.StatusOK, struct {
		Level string `json:"level"`
		Was   string `json:"was"`
	}{request.Level, was})
}

// status responds with the status of the bridge.
func (s *Server) status(w http.ResponseWriter, r *http.Request) {
	if _, err := parseQuery(r.URL.Query()); err != nil {
		writeError(w, http.StatusBadRequest, err.Error())
		return
	}
	o := s.source.Overview()
	writeJSON(w, http.StatusOK, struct {
		Version  string    `json:"version"` // of the program
		Started  time.Time `json:"started"`
		Revision uint64    `json:"revision"`  // number of changes of the state
		NotReady []string  `json:"not_ready"` // reasons why /readyz answers 503
		Config   Config    `json:"config"`
	}{o.Version, o.Started, uint64(o.Revision), nonNil(o.NotReady), o.Config})
}
