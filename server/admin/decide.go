package admin

import (
	"errors"
	"net/http"

	"github.com/isthmus-mesh/isthmus/server/state"
	"github.com/isthmus-mesh/isthmus/server/state/status"
)

// decision is the answer to a decision.
type decision struct {
	Registry string           `json:"registry"`
	Decision string           `json:"decision"` // allowed or kept
	On       state.Protection `json:"on"`       // what was paused
}

// former returns the handler of a call under its name of the release before.
func former(name string, next http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Deprecation", "@1795392000") // RFC 9745
		w.Header().Set("Link", "<"+name+`>; rel="successor-version"`)
		next(w, r)
	}
}

// decide allows a registry's paused removals, or keeps what they are about.
func (s *Server) decide(allow bool) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if _, err := parseQuery(r.URL.Query()); err != nil {
			writeError(w, http.StatusBadRequest, err.Error())
			return
		}
		d := decision{Registry: r.PathValue("registry"), Decision: "kept"}
		if allow {
			d.Decision = "allowed"
		}
		var err error
		switch d.On, err = s.source.Decide(d.Registry, allow); {
		case errors.Is(err, ErrNoRegistry):
			writeError(w, http.StatusNotFound, err.Error())
		case err != nil:
			writeError(w, http.StatusConflict, err.Error())
		default:
			writeJSON(w, http.StatusOK, d)
		}
	}
}

// removals lists what is served although its registry no longer has it.
func (s *Server) removals(w http.ResponseWriter, r *http.Request) {
	q, err := parseQuery(r.URL.Query(), "registry", "collection", "q", "limit", "after")
	if err != nil {
		writeError(w, http.StatusBadRequest, err.Error())
		return
	}
	writeJSON(w, http.StatusOK, page(s.source.Removals(q.registry), q, func(k status.Removal) bool {
		return either(q.collection, k.Collection) && contains(q.text, k.Name, k.Service)
	}, func(k status.Removal) string { return k.Registry + " " + k.Collection + " " + k.Name }))
}
