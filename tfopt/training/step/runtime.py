"""Makes a model's `fit` and `evaluate` run tfopt's training step.

Keras looks up `fit`, `make_train_function`, `make_test_function` and the method that builds metrics on the model. So
they are set on the instance. The model's class does not change, and a saved model does not contain them. After a plain
`model.compile`, the next use of the model removes them.

`Runtime` lives as long as the model is compiled. The state of one `fit` is in `FitCallback`.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfopt.compat.replace import callbacks_of, first_callback, replaced, steps_per_execution, unwrap, wrap
from tfopt.compat.trainer import BUILD, check_fit, compile_config, loss_calls, symbolic_build
from tfopt.data.epoch_order import UNCONTROLLED
from tfopt.errors import UnsupportedModelError, warn
from tfopt.signals import CTRL_C, raised_safely
from tfopt.training.checkpointing.checkpoints import Checkpoints
from tfopt.training.distributed.strategy import is_multi_worker
from tfopt.training.distributed.whole_batch import check_losses, refusal
from tfopt.training.memory import tensor_float_32_scope
from tfopt.training.plan import Plan
from tfopt.training.step.calls import MethodCall
from tfopt.training.step.data_errors import explain_specs
from tfopt.training.step.fit_callback import FitCallback, hold_masks, per_batch_callback
from tfopt.training.step.guards import Guard, Watch
from tfopt.training.step.keras_step import KerasStep
from tfopt.training.step.ledger import ATTRIBUTE, Ledger
from tfopt.training.step.noise import GradientNoise
from tfopt.training.step.noise_scale import NoiseScale
from tfopt.training.step.step import Step, without_islands
from tfopt.training.step.step_runner import CallSizes, MeasuringRunner, StepRunner, as_one_replica_sees, loss_is_finite
from tfopt.training.xla import compilation_cause, compilation_failed

METHODS = ("fit", "evaluate", "predict", "make_train_function", "make_test_function", BUILD)


class Runtime:
    """Trains and evaluates a compiled model until it is compiled anew.

    Args:
        make_step: Makes the step, with XLA or without.
        jit_compile: Whether to begin with XLA.
        explains: Whether errors of Keras and TensorFlow become errors that say what to do.
        when_built: Called before each training function is made, with the model built; None for nothing.
    """

    def __init__(
        self,
        model: keras.Model,
        plan: Plan,
        make_step: Callable[[bool], Step | KerasStep],
        *,
        jit_compile: bool,
        explains: bool = True,
        when_built: Callable[[], object] | None = None,
    ) -> None:
        self.model = model
        self.ledger = Ledger()
        self._make_step = make_step
        self._step = make_step(jit_compile)
        self._spec: Any = None  # of the last batch that the model was built for
        self._plan = plan
        checkpoints = Checkpoints(plan.config, model.distribute_strategy) if plan.config.checkpoint_dir else None
        self._guard = Guard(plan=plan, checkpoints=checkpoints, explains=explains)
        self._when_built = when_built
        self._strategy = model.distribute_strategy
        self._compiled = compile_config(model)
        self._fit: FitCallback | None = None  # the `fit` that is running
        self.noise: GradientNoise | None = None  # what the step measures, for a callback of the last `fit`
        self._measuring: MeasuringRunner | None = None  # of that noise
        self._made = False  # whether there has been a training function
        self._evaluation: CallSizes | None = None  # of the `evaluate` that is running
        # Of the loop that Keras prepares: made with its iterator, taken with the function that it asks for.
        self._prepared: CallSizes | None = None

    def install(self) -> None:
        """Sets the methods on the model."""
        check_fit()
        uninstall(self.model)
        setattr(self.model, ATTRIBUTE, self)
        own = type(self.model).test_step is not keras.Model.test_step  # the model evaluates in its own way
        wrap(self.model, self._call, *(name for name in METHODS if not (own and name == "make_test_function")))

    @raised_safely(CTRL_C)
    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if compile_config(self.model) is not self._compiled:  # model.compile was called after tfopt.compile
            uninstall(self.model)
            return getattr(self.model, name)(*args, **kwargs)
        return getattr(self, "build" if name == BUILD else name)(*args, **kwargs)

    def fit(self, *args: Any, **kwargs: Any) -> keras.callbacks.History:
        call = MethodCall(self.model, "fit", args, kwargs)
        if isinstance(call.get("x"), tf.data.Dataset) and call.get("shuffle") is None and call.names("shuffle"):
            call.set("shuffle", False)  # Keras cannot shuffle a dataset, and warns when it is told to
        with contextlib.ExitStack() as scopes:
            scopes.callback(setattr, self, "_fit", None)
            scopes.callback(self._plan.epoch.assign, UNCONTROLLED)
            scopes.enter_context(tensor_float_32_scope(self._plan.tensor_float_32))
            scopes.enter_context(self._guard.explaining(call.get("class_weight")))
            watch = Watch(self._guard, self.model, (call.get("x"), call.get("y")), self.ledger)
            checkpoints = None
            if self._guard.checkpoints is not None:
                checkpoints = scopes.enter_context(self._guard.checkpoints.around_fit(self.model, watch.check_state))
            given = call.get("callbacks")
            self._measure(given)
            fit = self._fit = FitCallback(
                given,
                watch=watch,
                ledger=self.ledger,
                counter=self._plan.epoch,
                synchronize=self.synchronize,
                checkpoints=checkpoints,
            )
            scopes.enter_context(self._singly(given, call))
            scopes.enter_context(fit.scopes)
            call.set("callbacks", scopes.enter_context(first_callback(self.model, fit, given)))
            history: keras.callbacks.History = call.run()
            hold_masks(self.model)
            fit.finish()
            return history

    def _measure(self, callbacks: Any) -> None:
        """Lets the step measure what the callbacks ask for, and nothing else."""
        asking = next((each for each in callbacks_of(callbacks) if isinstance(each, NoiseScale)), None)
        noise = asking.noise_of(self.model, self._plan) if asking and isinstance(self._step, Step) else None
        if noise is not self.noise:
            self.noise, self._measuring = noise, None

    def _singly(self, callbacks: Any, call: MethodCall) -> contextlib.AbstractContextManager[None]:
        """Runs one step per call where a callback acts on each batch, as a learning rate for each batch does.

        Workers keep the plan's steps: they run calls of one size, and their callbacks may differ.
        """
        callback = None
        if (
            self._plan.config.steps_per_execution == "auto"
            and self._guard.explains
            and not is_multi_worker(self._strategy)
        ):
            validates = call.get("validation_data") is not None or bool(call.get("validation_split"))
            callback = per_batch_callback(callbacks, validates=validates)
        self.ledger.one_by_one = callback
        if callback is None:
            return contextlib.nullcontext()
        of_keras = () if "make_test_function" in vars(self.model) else ("test_function",)
        return steps_per_execution(self.model, 1, "predict_function", *of_keras)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        call = MethodCall(self.model, "evaluate", args, kwargs)
        is_own = "make_test_function" not in vars(self.model)
        dividing = self._dividing(call.get("steps"), "test_function") if is_own else contextlib.nullcontext()
        islands = without_islands(self.model.jit_compile)
        with dividing, islands, self._guard.explaining(), replaced(self, _evaluation=None):
            return call.run()

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        call = MethodCall(self.model, "predict", args, kwargs)
        dividing = self._dividing(call.get("steps"), "predict_function")
        with dividing, without_islands(self.model.jit_compile), self._guard.explaining():
            return call.run()

    def _dividing(self, steps: int | None, function: str) -> contextlib.AbstractContextManager[None]:
        """Sets `steps_per_execution` to a divisor of the number of steps, for a function that Keras made.

        Keras only runs executions of one size, and would run more steps than requested.
        """
        sizes = range(1, self.model.steps_per_execution + 1)
        return steps_per_execution(self.model, max(size for size in sizes if not steps or steps % size == 0), function)

    def build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Builds what Keras builds when it has its iterator, or a single batch, and prepares the calls of the loop."""
        own = isinstance(self._step, Step)
        if not own:  # Keras may read a batch, and the order of the data depends on that
            getattr(type(self.model), BUILD)(self.model, iterator=iterator, data_batch=data_batch)
        self._prepared = None if iterator is None else self._call_sizes(iterator)
        batch = as_one_replica_sees(iterator, data_batch)
        if own:
            self._build_for(batch)

    def _call_sizes(self, iterator: Any) -> CallSizes:
        # Workers may have data of different lengths, and must make calls of the same size. So the data decides where
        # their epoch ends, unless steps_per_epoch does.
        total = iterator.steps_per_epoch if is_multi_worker(self._strategy) else iterator.num_batches
        return CallSizes(iterator, self.model.steps_per_execution, total)

    def _build_for(self, batch: Any) -> None:
        """Builds metrics and optimizer: Keras would build them in the traced step, which fails inside loops.

        Refuses losses that are functions of the whole batch, where the step divides it.
        """
        step = self._step
        assert isinstance(step, Step)
        with self._strategy.scope():
            spec = self._spec = step.spec(batch)
            with loss_calls() as calls, self._explaining():
                try:
                    symbolic_build(self.model, spec)
                except RuntimeError:
                    # The model may need values, not symbols. Its metrics are then built in the first step, too late for
                    # a checkpoint that is restored before.
                    if not self.model.run_eagerly or step.divided or self._guard.checkpoints is not None:
                        raise
                    self.model(_zeros(keras.utils.unpack_x_y_sample_weight(spec)[0]))
            if step.divided:
                check_losses(calls, step.divided)
                for loss in getattr(vars(self.model).get("compute_loss"), "of_whole_batch", ()):  # of tfopt.distill
                    raise refusal(loss, step.divided)
            if spec is not None:
                step.prepare(spec)
            if self.model.optimizer is not None and not self.model.optimizer.built:
                self.model.optimizer.build(self.model.trainable_variables)

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Says which shapes do not fit where Keras builds or traces the model for the batches at hand."""
        try:
            yield
        except Exception as error:
            if not self._guard.explains or self._spec is None:
                raise
            misfit = explain_specs(error, self.model, keras.utils.unpack_x_y_sample_weight(self._spec))
            if misfit is None:
                raise
            raise misfit from error

    def make_train_function(self, force: bool = False) -> None:
        prepared, self._prepared = self._prepared, None
        if self._fit is not None and prepared is not None:  # None: a callback trains on a single batch
            self._fit.call_sizes = prepared
        if self.model.train_function is None or force:
            if self._when_built is not None:
                self._when_built()
            if self._made:  # the traces of the step hold the model as it was, such as its loss and its masks
                self._renew_step(self._step.jit_compile)
            self._made = True
            self.model.train_function = self._train_function()

    def make_test_function(self, force: bool = False) -> None:
        self._evaluation, self._prepared = self._prepared, None
        self.synchronize()  # Keras asks for the function at every evaluation
        if self.model.test_function is None or force:
            self.model.test_function = self._test_function()

    def _train_function(self) -> Callable[[Any], dict[str, Any]]:
        plain = self._plain_runner()

        def train(iterator: Any) -> dict[str, Any]:
            nonlocal plain
            if not _is_of_tensorflow(iterator):  # train_on_batch
                return plain.on_batch(next(iterator))
            fit = self._fit
            if fit is not None and not fit.has_begun:
                raise UnsupportedModelError(
                    "fit must pass its callbacks to Keras' fit, because tfopt adds one that orders the data of an "
                    f"epoch and saves checkpoints. Received: {self.model.name!r}, whose class "
                    f"{type(self.model).__name__} overrides fit. Let it take **kwargs, and call super().fit with them."
                )
            sizes = None if fit is None else fit.call_sizes
            count = self.model.steps_per_execution if sizes is None else sizes.next()
            replayed = 0 if fit is None else fit.replay(iterator, count)
            count -= replayed
            if not count:
                return self.model.get_metrics_result()
            while_finite = fit is not None and bool(fit.ending)
            begin = time.perf_counter()
            runner = self._measured(plain)
            if self._step.jit_compile and not runner.probed:
                try:
                    batch = next(iterator)
                except StopIteration:
                    if replayed:  # the epoch has no more steps
                        return self.model.get_metrics_result()
                    raise
                try:
                    done, logs = runner.from_batch(batch, iterator, count, while_finite=while_finite)
                except Exception as error:
                    if not compilation_failed(error):
                        raise
                    plain = self._give_up_xla(error)
                    runner = self._measured(plain)
                    done, logs = runner.from_batch(batch, iterator, count, while_finite=while_finite)
            else:
                done, logs = runner.from_iterator(iterator, count, while_finite=while_finite)
            plain.probed = runner.probed = True
            steps = int(done)
            if not steps:
                if replayed:  # the epoch has no more steps
                    return logs
                raise StopIteration
            self.ledger.called(time.perf_counter() - begin, steps)
            if fit is not None:
                fit.after(steps, logs)
            if steps < count and sizes is not None:
                if while_finite and not loss_is_finite(logs):
                    sizes.stopped(count - steps)
                else:
                    sizes.data_ended()
            return logs

        return train

    def _plain_runner(self) -> StepRunner:
        self._measuring = None  # of another step
        return self._runner(self._step.train, self.ledger)

    def _measured(self, plain: StepRunner) -> StepRunner | MeasuringRunner:
        """Returns the runner for training: where a callback asks for the noise, one that also measures it."""
        if self.noise is None or not isinstance(self._step, Step):
            return plain
        if self._measuring is None:
            run = functools.partial(self._step.train, noise=self.noise)
            self._measuring = MeasuringRunner(plain, self._runner(run, self.ledger), self.noise.every)
        return self._measuring

    def _test_function(self) -> Callable[[Any], dict[str, Any]]:
        runner = self._runner(self._step.test, None)

        def evaluate(iterator: Any) -> dict[str, Any]:
            if not _is_of_tensorflow(iterator):  # test_on_batch
                return runner.on_batch(next(iterator))
            sizes = self._evaluation
            count = self.model.steps_per_execution if sizes is None else sizes.next()
            done, logs = runner.from_iterator(iterator, count)
            if not int(done):
                raise StopIteration
            if int(done) < count and sizes is not None:
                sizes.data_ended()
            return logs

        return evaluate

    def _runner(self, run: Callable[[Any], Any], ledger: Ledger | None) -> StepRunner:
        def explained(batch: Any) -> Any:
            with self._explaining():
                return run(batch)

        return StepRunner(self.model, explained, ledger, watch_shapes=self._step.jit_compile and ledger is not None)

    def _renew_step(self, jit_compile: bool) -> None:
        self._step = self._make_step(jit_compile)
        if isinstance(self._step, Step) and self._spec is not None:
            self._step.prepare(self._spec)

    def _give_up_xla(self, error: BaseException) -> StepRunner:
        cause = compilation_cause(error, self.model)
        warn(f"{cause}. The training goes on without XLA. Set jit_compile=False to start without XLA.")
        self.ledger.gave_up_xla(cause)
        self._renew_step(False)
        self.model.jit_compile = False
        self._compiled = compile_config(self.model)
        self.model.test_function = self.model.predict_function = None
        return self._plain_runner()

    @functools.cached_property
    def synchronize(self) -> Callable[[], None]:
        """Averages the variables that each replica updates by itself."""
        if isinstance(self._step, KerasStep) or not self._step.is_distributed:  # Keras leaves it to the strategy
            return lambda: None
        return tf.function(functools.partial(self._step.synchronize))  # a partial: see StepRunner


def uninstall(model: keras.Model) -> None:
    """Removes tfopt's methods from a model, if it has them."""
    unwrap(model, *METHODS, ATTRIBUTE)


def next_steps(model: keras.Model) -> int:
    """Returns how many batches the next call of a model's training function takes, if the epoch still has them."""
    runtime: Runtime | None = getattr(model, ATTRIBUTE, None)
    sizes = None if runtime is None or runtime._fit is None else runtime._fit.call_sizes
    return int(model.steps_per_execution if sizes is None else sizes.iterator.steps_per_execution)


def is_trained_by_tfopt(model: keras.Model) -> bool:
    """Returns whether tfopt's step trains a model."""
    return getattr(model, ATTRIBUTE, None) is not None


def plan_of(model: keras.Model) -> Plan | None:
    """Returns the plan that tfopt trains a model under; None if Keras' own step trains it."""
    found = getattr(model, ATTRIBUTE, None)
    return None if found is None else found._plan


def _zeros(specs: Any) -> Any:
    """Returns inputs of zeros, with one example where the size is open."""
    return keras.tree.map_structure(lambda spec: tf.zeros([size or 1 for size in spec.shape], spec.dtype), specs)


def _is_of_tensorflow(iterator: Any) -> bool:
    return isinstance(iterator, tf.data.Iterator | tf.distribute.DistributedIterator)
