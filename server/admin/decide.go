package admin

import (
	"errors"
	"net/http"

	"github.com/isthmus-mesh/isthmus/server/state"
)

// decision is the answer to a decision.
type decision struct {
	Registry string           `json:"registry"`
	Decision string           `json:"decision"` // accepted or refused
	On       state.Protection `json:"on"`       // what was held back
}

// decide accepts or refuses what is held back of a registry's removals.
func (s *Server) decide(accept bool) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if _, err := parseQuery(r.URL.Query()); err != nil {
			writeError(w, http.StatusBadRequest, err.Error())
			return
		}
		d := decision{Registry: r.PathValue("registry"), Decision: "refused"}
		if accept {
			d.Decision = "accepted"
		}
		var err error
		switch d.On, err = s.source.Decide(d.Registry, accept); {
		case errors.Is(err, ErrNoRegistry):
			writeError(w, http.StatusNotFound, err.Error())
		case err != nil:
			writeError(w, http.StatusConflict, err.Error())
		default:
			writeJSON(w, http.StatusOK, d)
		}
	}
}

// kept lists what is served although its registry no longer has it.
func (s *Server) kept(w http.ResponseWriter, r *http.Request) {
	q, err := parseQuery(r.URL.Query(), "registry", "collection", "q", "limit", "after")
	if err != nil {
		writeError(w, http.StatusBadRequest, err.Error())
		return
	}
	writeJSON(w, http.StatusOK, page(s.source.Kept(q.registry), q, func(k state.Kept) bool {
		return either(q.collection, k.Collection) && contains(q.text, k.Name, k.Service)
	}, func(k state.Kept) string { return k.Registry + " " + k.Collection + " " + k.Name }))
}
